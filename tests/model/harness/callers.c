/* interrupt.c, with the list of callers within reach. */
#include "serve/interrupt.c"

/* One entry of the list, as interrupt_tick does it. */
void interrupt_again(struct fastpath *fastpath, uint64_t unique)
{
    for (uint32_t i = 0; i < count; i++)
        if (interrupted[i] == unique && try_interrupt(fastpath, unique))
            interrupted[i--] = interrupted[--count];
}

uint32_t interrupts_noted(uint64_t *uniques)
{
    memcpy(uniques, interrupted, count * sizeof *interrupted);
    return count;
}

void forget_interrupts(void)
{
    count = 0;
}
