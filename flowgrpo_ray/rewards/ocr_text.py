"""The text that ocr is asked for: where the prompt holds it, how it is compared, and whether the recogniser can read it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Set
from functools import lru_cache

# Scripts by the first word of their characters' names, and the `lang` of PaddleOCR that reads them.
LANGUAGES = {
    "CYRILLIC": "ru", "ARABIC": "ar", "GREEK": "el", "HANGUL": "korean", "DEVANAGARI": "hi", "THAI": "th", "TAMIL": "ta",
    "TELUGU": "te", "KANNADA": "ka", "CJK": "ch", "HIRAGANA": "japan", "KATAKANA": "japan",
}
# Greek capitals that look like Latin ones. A recogniser without accented Greek letters knows Greek as symbols only (π, Ω),
# and reads these as Latin.
_LOOK_ALIKE = frozenset("ΑΒΕΖΗΙΚΜΝΟΡΤΥΧ")
SHOWN = 8  # characters that a message lists


def target_span(prompt: str) -> tuple[int, int] | None:
    """[start, end) of the text between the first pair of double quotes, or None if there is no pair."""
    start = prompt.find('"') + 1
    end = prompt.find('"', start) if start else -1
    return (start, end) if end >= 0 else None


def target_text(prompt: str) -> str | None:
    """The text between the first pair of double quotes, or None if there is no pair."""
    span = target_span(prompt)
    return None if span is None else prompt[slice(*span)]


def normalized(text: str, rule: str) -> str:
    """What is compared. `reference`: lower case without spaces. `alnum`: NFKC, upper case, only A-Z and 0-9. `unicode`: NFKC,
    case folded, letters and digits of any script."""
    if rule == "reference":
        return text.replace(" ", "").lower()
    if rule == "unicode":
        return "".join(c for c in unicodedata.normalize("NFKC", text).casefold() if c.isalnum())
    return re.sub("[^A-Z0-9]", "", unicodedata.normalize("NFKC", text).upper())


def is_blank(target: str, rule: str) -> bool:
    """Whether nothing of a target can be seen and compared: white space of any kind and invisible characters alone."""
    return all(unicodedata.category(c)[0] in "ZC" for c in normalized(target, rule))


@lru_cache(maxsize=8)
def _readable(characters: frozenset[str], rule: str) -> frozenset[str]:
    """What the recogniser's characters can give after `normalized`."""
    return frozenset(normalized("".join(characters), rule)) | {c for each in characters for c in normalized(each, rule)}


def unreadable(target: str, rule: str, characters: Set[str]) -> list[str]:
    """Characters of a target, in its order, that a recogniser with these `characters` never gives, so that no image of
    the text could score 1."""
    known = _readable(frozenset(characters), rule)
    missing = {c for c in normalized(target, rule) if c not in known}
    if rule != "alnum" and "ή" not in characters:
        missing |= set(target) & _LOOK_ALIKE
    shown = dict.fromkeys(c for c in target if c in missing or missing & set(normalized(c, rule)))
    return list(shown) or sorted(missing)


def unreadable_problem(missing: list[str], *, lang: str | None, full: bool) -> str:
    """What to say of characters that the recogniser cannot read, with the option that would read them."""
    language = _language(missing)
    if language not in (None, lang):
        mode = "" if full else "mode: full and "
        way = f"; use {mode}lang: {language} in the reward's options, or rec_model_dir of a model that reads them"
    else:
        way = "; write the text with other characters, or give rec_model_dir of a model that reads them"
    return f"the recogniser cannot read {_named(missing)}{way}"


def dropped_problem(target: str, characters: Set[str] | None, *, lang: str | None, full: bool) -> str | None:
    """What to say of a target whose letters and digits `normalize: alnum` all leaves out, with the options that would
    compare and read them; None if it has none. `characters` are the recogniser's, where they are known."""
    dropped = [c for c in dict.fromkeys(target) if c.isalnum()]
    if not dropped:
        return None
    language = _language(dropped if characters is None else unreadable(target, "unicode", characters))
    options = ["normalize: unicode"]
    if language not in (None, lang):
        options += [] if full else ["mode: full"]
        options.append(f"lang: {language}")
    listed = " and ".join(filter(None, [", ".join(options[:-1]), options[-1]]))
    return f"normalize: alnum compares A-Z and 0-9 alone, not {_named(dropped)}; use {listed} in the reward's options"


def _named(characters: list[str]) -> str:
    """Characters with their code points and names; the first ones of many."""
    named = ", ".join(f"{c!r} (U+{ord(c):04X} {unicodedata.name(c, 'unnamed')})" for c in characters[:SHOWN])
    return named + (f" and {len(characters) - SHOWN} more" if len(characters) > SHOWN else "")


def _language(characters: list[str]) -> str | None:
    """The `lang` of PaddleOCR for the letters among some characters; None if no single one reads them."""
    languages = {LANGUAGES.get(unicodedata.name(c, "").split(" ")[0]) for c in characters if c.isalpha()}
    return languages.pop() if len(languages) == 1 else None
