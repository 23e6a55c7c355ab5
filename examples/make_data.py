"""Render the emoji data set of this example: pictures, names and keywords in fourteen languages.

    python make_data.py

needs the PyPI packages ``emoji`` and ``pillow`` (with Raqm) and the Debian packages
``fonts-noto-color-emoji`` and ``unicode-cldr-core``. The training script reads only the file
written here. Same versions in, same bytes out.
"""

import argparse
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import emoji
import numpy as np
from emoji import config
from PIL import Image, ImageDraw, ImageFont, features

HERE = Path(__file__).resolve().parent
FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
CLDR = Path("/usr/share/unicode/cldr/common")

SIDE = 32
STRIKE = 109  # the font's one bitmap size; its glyphs are 136 wide and 128 high
CANVAS = 136
TOP = (CANVAS - 128) // 2

SAME_PICTURE = 0.06  # root mean square difference, pixels in [0, 1]

VARIATION_SELECTOR = "\ufe0f"
JOINER = "\u200d"
SKIN_TONES = {chr(c) for c in range(0x1F3FB, 0x1F400)}
HAIR = {chr(c) for c in range(0x1F9B0, 0x1F9B4)}
# What tells variants of one concept apart: tone, hair, gender sign, "facing right".
MODIFIERS = SKIN_TONES | HAIR | {VARIATION_SELECTOR, JOINER, "♀", "♂", "➡"}
ADULT, CHILD, ELDER, FAMILY = "🧑", "🧒", "🧓", "👪"
NEUTRAL = {
    "👨": ADULT, "👩": ADULT, "👦": CHILD, "👧": CHILD, "👴": ELDER, "👵": ELDER,
    "👫": "🧑🤝🧑", "👬": "🧑🤝🧑", "👭": "🧑🤝🧑", "💏": "🧑❤💋🧑", "💑": "🧑❤🧑",
}  # fmt: skip
GENDER_WORDS = re.compile(r"\b(man|men|woman|women|person|people|prince|princess)\b")
TONE_WORDS = re.compile(r"\b(medium-light|medium-dark|light|medium|dark) skin tone\b")


def load_font(path: Path) -> ImageFont.FreeTypeFont:
    """The colour font at its native strike, shaped by Raqm (joined sequences become one glyph)."""
    if not features.check("raqm"):
        raise RuntimeError(
            "pillow was built without Raqm, which joins emoji sequences to one glyph"
        )
    return ImageFont.truetype(str(path), STRIKE, layout_engine=ImageFont.Layout.RAQM)


def render(text: str, font: ImageFont.FreeTypeFont) -> np.ndarray | None:
    """One emoji as [SIDE, SIDE, 3] uint8 on white, or None where the font has no single glyph.

    A sequence that the font does not know falls apart into several glyphs, so it is too long; a
    character that it does not know leaves the canvas empty.
    """
    if round(font.getlength(text)) != CANVAS:
        return None
    canvas = Image.new("RGB", (CANVAS, CANVAS), "white")
    ImageDraw.Draw(canvas).text((0, TOP), text, font=font, embedded_color=True)
    picture = np.asarray(canvas)
    if picture.min() == 255:
        return None
    return np.asarray(canvas.resize((SIDE, SIDE), Image.Resampling.LANCZOS))


def render_all(font: ImageFont.FreeTypeFont) -> dict[str, np.ndarray]:
    """Every fully-qualified emoji that the font can draw, in the package's order."""
    qualified = emoji.STATUS["fully_qualified"]
    listed = [text for text, entry in emoji.EMOJI_DATA.items() if entry["status"] == qualified]
    drawn = {text: picture for text in listed if (picture := render(text, font)) is not None}
    print(f"{len(drawn)} of {len(listed)} fully-qualified emoji drawn; the font lacks the rest")
    return drawn


def plain(short_code: str) -> str:
    """``:woman_astronaut:`` as words."""
    return short_code.strip(":").replace("_", " ")


def load_keywords(cldr: Path, language: str) -> dict[str, list[str]]:
    """CLDR's search keywords of one language, by emoji without variation selectors."""
    keywords: dict[str, list[str]] = {}
    for folder in ("annotations", "annotationsDerived"):
        path = cldr / folder / f"{language}.xml"
        for node in ElementTree.parse(path).iterfind("annotations/annotation"):
            if node.get("type") is None and node.text:
                keywords[node.attrib["cp"]] = [word.strip() for word in node.text.split("|")]
    return keywords


def keywords_of(text: str, name: str, language: str, cldr: dict[str, list[str]]) -> str:
    """Keywords (English: the package's aliases too) joined by ``|``, without the name itself."""
    words = list(cldr.get(text.replace(VARIATION_SELECTOR, ""), []))
    if language == "en":
        words += [plain(alias) for alias in emoji.EMOJI_DATA[text].get("alias", [])]
    return "|".join(word for word in dict.fromkeys(words) if word.casefold() != name.casefold())


def collect_texts(texts: list[str], cldr: Path) -> tuple[np.ndarray, np.ndarray]:
    """Names and keywords, both [N, languages] str."""
    names, keywords = [], []
    for language in emoji.LANGUAGES:
        config.load_language(language)
        known = load_keywords(cldr, language)
        column = [plain(emoji.EMOJI_DATA[text][language]) for text in texts]
        names.append(column)
        keywords.append(
            [keywords_of(t, n, language, known) for t, n in zip(texts, column, strict=True)]
        )
    return np.array(names).T, np.array(keywords).T


def sequence_key(text: str) -> str:
    """The code points of an emoji without what tells variants of one concept apart."""
    key = "".join(NEUTRAL.get(c, c) for c in text if c not in MODIFIERS)
    is_family = len(key) > 1 and set(key) <= {ADULT, CHILD}
    return FAMILY if is_family else key


def name_key(name: str) -> str:
    """The English name without gender and skin tone ("man dancing" and "woman dancing" agree)."""
    bare = " ".join(GENDER_WORDS.sub("", TONE_WORDS.sub("", name)).split())
    return bare or ADULT


def same_pictures(images: np.ndarray) -> list[tuple[int, int]]:
    """Pairs of pictures ([N, SIDE, SIDE, 3] uint8) that a reader could not tell apart."""
    flat = images.reshape(len(images), -1).astype(np.float32) / 255
    power = (flat**2).sum(1)
    squared = (power[:, None] + power - 2 * flat @ flat.T) / flat.shape[1]
    rows, columns = np.nonzero(np.triu(squared < SAME_PICTURE**2, k=1))
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def group_variants(texts: list[str], english: list[str], images: np.ndarray) -> np.ndarray:
    """Concept number of each emoji, [N] int32: variants and look-alikes share one (union-find)."""
    parent = list(range(len(texts)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    links = same_pictures(images)
    for keys in ([sequence_key(t) for t in texts], [name_key(n) for n in english]):
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        links += [(first[key], i) for i, key in enumerate(keys)]
    for i, j in links:
        low, high = sorted((root(i), root(j)))
        parent[high] = low
    return np.unique([root(i) for i in range(len(texts))], return_inverse=True)[1].astype(np.int32)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--font", type=Path, default=FONT)
    parser.add_argument("--cldr", type=Path, default=CLDR, help="CLDR's folder 'common'")
    parser.add_argument("--output", type=Path, default=HERE / "data" / "emoji.npz")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    drawn = render_all(load_font(args.font))
    texts, images = list(drawn), np.stack(list(drawn.values()))
    names, keywords = collect_texts(texts, args.cldr)
    english = names[:, emoji.LANGUAGES.index("en")].tolist()
    concept = group_variants(texts, english, images)
    np.savez_compressed(
        args.output,
        images=images,
        emoji=np.array(texts),
        concept=concept,
        languages=np.array(emoji.LANGUAGES),
        names=names,
        keywords=keywords,
    )
    largest = Counter(concept.tolist()).most_common(1)[0][1]
    print(f"{concept.max() + 1} concepts, the largest of {largest} variants")
    print(f"{args.output}: {args.output.stat().st_size / 1e6:.1f} MB, emoji {version('emoji')}")


if __name__ == "__main__":
    main()
