"""A labelled grid of pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

SMALLEST = 160
"""Pixels: narrower pictures are enlarged, or no label would fit above them."""
BACKGROUND, INK, FAINT = (24, 24, 28), (240, 240, 240), (176, 176, 184)


def draw(labels: Sequence[str], prompts: Sequence[str], columns: Sequence[Sequence[Path]], side: int = 0) -> Image:
    """A picture with a column for each label and a row for each prompt, which stands above its row.

    ``columns``: the files of each column, one a prompt, all of one size; ``side``: their longer side in the grid, in
    pixels (0: as they are). Small ones are enlarged by whole factors, so that they stay sharp.
    """
    from PIL import Image, ImageDraw

    cells = [[_cell(path, side) for path in column] for column in columns]
    width, height = cells[0][0].size
    gap = max(4, width // 64)
    font = _font(min(48, max(14, width // 16)))
    line = _height(font)
    across = gap + len(columns) * (width + gap)
    heads = [_wrapped(text, font, width) for text in labels]
    rows = [_wrapped(f"{i}. {text}" if len(prompts) > 1 else text, font, across - 2 * gap)
            for i, text in enumerate(prompts, 1)]  # fmt: skip
    top = gap + line * max(map(len, heads))
    down = top + sum(gap + line * len(text) + gap // 2 + height for text in rows) + gap
    whole = Image.new("RGB", (across, down), BACKGROUND)
    pen = ImageDraw.Draw(whole)
    for i, head in enumerate(heads):
        for j, text in enumerate(head):
            pen.text((gap + i * (width + gap), gap + j * line), text, fill=INK, font=font)
    y = top
    for i, texts in enumerate(rows):
        y += gap
        for text in texts:
            pen.text((gap, y), text, fill=FAINT, font=font)
            y += line
        y += gap // 2
        for j, column in enumerate(cells):
            whole.paste(column[i], (gap + j * (width + gap), y))
        y += height
    return whole


def _cell(path: Path, side: int) -> Image:
    from PIL import Image

    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    if side and max(picture.size) > side:
        picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    if picture.width < SMALLEST:
        factor = -(-SMALLEST // picture.width)
        picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    return picture


def _font(size: int) -> Any:
    from PIL import ImageFont

    try:
        return ImageFont.load_default(size)
    except (TypeError, OSError):  # a Pillow before 10.1, or without FreeType: one size only
        return ImageFont.load_default()


def _height(font: Any) -> int:
    box = font.getbbox("Ajgy")
    return int(box[3] * 1.25) + 1


def _wrapped(text: str, font: Any, width: int) -> list[str]:
    """``text`` in lines of at most ``width`` pixels, three of them; what is beyond them is cut."""
    from PIL import ImageFont

    if not isinstance(font, ImageFont.FreeTypeFont):  # the one-size font knows few characters, and fails at others
        text = text.encode("ascii", "replace").decode()
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    if len(lines) > 3:
        lines = [*lines[:2], f"{lines[2]} ..."]
    return [_cut(one, font, width) for one in lines]


def _cut(text: str, font: Any, width: int) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text.rstrip() + "..."
