#include "appender/record.h"

#include <string.h>

#include "cache/blob.h"
#include "common/assertion.h"

uint64_t record_bytes(uint32_t length)
{
    return (RECORD_HEADER_BYTES + 8 * (uint64_t)block_count(length) + length + 7) / 8 * 8;
}

bool put_record(struct blob_writer *writer, const struct fetch *fetch, uint64_t at, uint64_t seed, struct extent *extent)
{
    uint32_t blocks = block_count(fetch->length);
    ASSERT(fetch->payload && blocks && blocks <= MAX_CHECKSUMS);
    for (uint32_t block = 0; block < blocks; block++) {
        uint32_t from = block * BLOCK_BYTES, rest = fetch->length - from;
        extent->checksums[block] = checksum(fetch->payload + from, rest < BLOCK_BYTES ? rest : BLOCK_BYTES, seed);
    }
    const struct inode_record *record = &fetch->record;
    struct record_header header = {
        .magic = RECORD_MAGIC,
        .format = RECORD_FORMAT,
        .type = RECORD_DATA,
        .length = fetch->length,
        .inode = fetch->inode,
        .file_offset = fetch->offset,
        .version = record->version,
        .size = record->size,
        .mtime_ns = record->mtime_ns,
        .ctime_ns = record->ctime_ns,
        .btime_ns = record->btime_ns,
        .device = record->device,
        .source_inode = record->source_inode,
        .mode = record->mode,
        .blocks = blocks,
        .table_checksum = checksum(extent->checksums, blocks * sizeof(uint64_t), seed),
    };
    header.checksum = checksum(&header, offsetof(struct record_header, checksum), seed);
    static const uint8_t zeros[8];
    uint64_t front = sizeof header + blocks * sizeof(uint64_t), whole = record_bytes(fetch->length);
    extent->record = (struct extent_record){
        .flags = PINNED,
        .length = fetch->length,
        .blob_offset = at + front,
        .version = record->version,
        .record_bytes = whole,
    };
    return blob_writer_put(writer, at, &header, sizeof header) &&
           blob_writer_put(writer, at + sizeof header, extent->checksums, blocks * sizeof(uint64_t)) &&
           blob_writer_put(writer, at + front, fetch->payload, fetch->length) &&
           blob_writer_put(writer, at + front + fetch->length, zeros, (size_t)(whole - front - fetch->length));
}

uint32_t encode_report(uint8_t *out, const struct fetch *fetch, const struct extent *extent, uint64_t number)
{
    uint32_t count = block_count(fetch->length);
    struct filled filled = {
        .report = number,
        .inode = fetch->inode,
        .offset = fetch->offset,
        .version = extent->record.version,
        .blob_offset = extent->record.blob_offset,
        .record_bytes = extent->record.record_bytes,
        .length = fetch->length,
        .checksums = count,
    };
    memcpy(out, &filled, sizeof filled);
    memcpy(out + sizeof filled, extent->checksums, count * sizeof(uint64_t));
    return (uint32_t)(sizeof filled + count * sizeof(uint64_t));
}
