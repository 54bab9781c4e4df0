"""Make a small dataset of real JPEG files: DIR/train/CLASS/NAME.jpg, a kind of shape for each class.

python examples/make_images.py /ceph/shapes --images 2000
"""

import argparse
import random
from pathlib import Path

from PIL import Image, ImageDraw

CLASSES = ("circle", "square", "triangle", "ring", "cross", "bars")


def draw_shape(kind: str, draw: random.Random, size: int) -> Image.Image:
    """One picture: the shape at a random place, in random colours, with noise that makes it hard to recognize."""
    colour = tuple(draw.randrange(256) for _ in range(3))
    image = Image.new("RGB", (size, size), tuple(draw.randrange(256) for _ in range(3)))
    pen = ImageDraw.Draw(image)
    for _ in range(30):
        x, y = draw.randrange(size), draw.randrange(size)
        pen.line((x, y, x + draw.randrange(20), y + draw.randrange(20)), tuple(draw.randrange(256) for _ in range(3)))
    r = draw.randrange(size // 6, size // 3)
    x, y = draw.randrange(r, size - r), draw.randrange(r, size - r)
    if kind == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif kind == "square":
        pen.rectangle((x - r, y - r, x + r, y + r), fill=colour)
    elif kind == "triangle":
        pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
    elif kind == "ring":
        pen.ellipse((x - r, y - r, x + r, y + r), outline=colour, width=max(2, r // 4))
    elif kind == "cross":
        pen.line((x - r, y, x + r, y), fill=colour, width=max(3, r // 3))
        pen.line((x, y - r, x, y + r), fill=colour, width=max(3, r // 3))
    else:
        for offset in range(-r, r + 1, max(4, r // 2)):
            pen.line((x - r, y + offset, x + r, y + offset), fill=colour, width=max(2, r // 5))
    return image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--images", type=int, default=600, help="of all classes together [600]")
    parser.add_argument("--size", type=int, default=128, help="in pixels [128]")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    for number in range(arguments.images):
        kind = CLASSES[number % len(CLASSES)]
        place = arguments.directory / "train" / kind
        place.mkdir(parents=True, exist_ok=True)
        draw_shape(kind, draw, arguments.size).save(place / f"{kind}_{number:06}.jpg", quality=90)
    print(f"{arguments.images} images in {arguments.directory}/train")


if __name__ == "__main__":
    main()
