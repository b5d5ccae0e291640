import pytest

from flowgrpo_ray.rewards import RewardError, reward_class
from flowgrpo_ray.rewards.ocr import text_score
from flowgrpo_ray.rewards.ocr_text import normalized, target_text


@pytest.mark.parametrize(("read", "target", "score", "exact"), [
    ("Hello World", "hello world", 1.0, 1.0),
    ("HELLOWORLD", "Hello World", 1.0, 1.0),
    ("say hello now", "Hello", 1.0, 0.0),  # contained
    ("helo", "hello", 1 - 1 / 5, 0.0),
    ("hallo!", "hello", 1 - 2 / 5, 0.0),
    ("hello", "help", 1 - 2 / 4, 0.0),
    ("", "hello", 0.0, 0.0),
    ("a very long text that holds none of it", "xyz", 0.0, 0.0),  # distance capped at the length
    ("ＣＡＴ", "CAT", 0.0, 0.0),  # full-width letters stay what they are
])
def test_reference_rule(read, target, score, exact):
    assert text_score(read, target, "reference") == (pytest.approx(score), exact)


@pytest.mark.parametrize(("read", "target", "score", "exact"), [
    ("cat", "CAT", 1.0, 1.0),
    ("C-A T.", "cat", 1.0, 1.0),
    ("ＣＡＴ", "CAT", 1.0, 1.0),
    ("CATS", "CAT", 1 - 1 / 3, 0.0),  # containing is not enough
    ("CA", "CAT", 1 - 1 / 3, 0.0),
    ("1O", "IO", 1 - 1 / 2, 0.0),
    ("猫", "CAT", 0.0, 0.0),
    ("ABCDEFGH", "XYZ", 0.0, 0.0),
])
def test_alnum_rule(read, target, score, exact):
    assert text_score(read, target, "alnum") == (pytest.approx(score), exact)


def test_an_empty_target_is_an_error_and_no_division():
    with pytest.raises(RewardError, match="nothing is left of the target '!!'"):
        text_score("CAT", "!!", "alnum")


@pytest.mark.parametrize(("prompt", "target"), [
    ('the word "CAT"', "CAT"), ('"A" and "B"', "A"), ('a "" b "C"', ""), ('one " only', None), ("none", None),
])
def test_target_is_between_the_first_pair_of_double_quotes(prompt, target):
    assert target_text(prompt) == target


def test_normalized():
    assert normalized("Café  №1", "reference") == "café№1"
    assert normalized("Cafe  №1", "alnum") == "CAFENO1"


@pytest.mark.parametrize(("prompt", "options", "reason"), [
    ('the word "CAT"', {}, None),
    ('the word "日本"', {}, None),
    ("the word CAT", {}, "needs the text to be read in double quotes, for example: "),
    ('the word "CAT', {}, "needs the text to be read in double quotes"),
    ("the word “CAT”", {}, "typographic quotes do not count"),
    ('the word ""', {}, "'' is empty under normalize: reference"),
    ('the word " "', {}, "empty under normalize: reference"),
    ('the word "!?"', {"normalize": "alnum"}, "'!?' is empty under normalize: alnum"),
    ('the word "CAT"', {"normalize": "alnum", "mode": "recognition"}, None),
])
def test_check_prompt_gives_the_reason_and_an_example(prompt, options, reason):
    cls = reward_class("ocr")
    problem = cls.check_prompt(prompt, {}, **options)
    if reason is None:
        assert problem is None
    else:
        assert reason in problem
        example = problem.split(": ", 1)[1] if "example:" in problem else problem.split("is: ")[1]
        assert cls.check_prompt(example, {}, **options) is None


def test_unicode_keeps_letters_of_any_script():
    assert normalized("Straße – ＡＢ, 東京!", "unicode") == "strasseab東京"
    assert text_score("東京タワー", "東京タワ—", "unicode") == (0.75, 0.0)


@pytest.mark.parametrize(("target", "options", "found", "way"), [
    ("МИР", {}, "'М' (U+041C CYRILLIC CAPITAL LETTER EM), 'И'", "normalize: unicode and lang: ru"),
    ("мир, труд", {"mode": "recognition"}, "'м' (U+043C", "normalize: unicode, mode: full and lang: ru"),
    ("МИР", {"lang": "ru"}, "U+041C", "use normalize: unicode in"),
    ("日本", {}, "'日' (U+65E5", "use normalize: unicode in"),  # the shipped recogniser reads it
    ("안녕", {}, "HANGUL SYLLABLE", "normalize: unicode and lang: korean"),
    ("שלום", {}, "HEBREW LETTER", "use normalize: unicode in")])
def test_letters_that_alnum_leaves_out_are_named_with_the_options_that_read_them(target, options, found, way):
    problem = reward_class("ocr").check_prompt(f'a sign "{target}"', {}, normalize="alnum", **options)
    assert "compares A-Z and 0-9 alone" in problem and found in problem and way in problem
    assert reward_class("ocr").check_prompt(f'a sign "{target} 5"', {}, normalize="alnum", **options) is None


# What the recogniser can read -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("target", ["\t", "\u00a0", "\u3000", "\u200b", " \t\u2003", "\ufeff", "\u0007"])
@pytest.mark.parametrize("rule", ["reference", "alnum", "unicode"])
def test_a_target_that_shows_nothing_is_rejected(target, rule):
    assert f"is empty under normalize: {rule}" in reward_class("ocr").check_prompt(f'a sign "{target}"', {}, normalize=rule)


@pytest.mark.parametrize(("target", "found", "way"), [
    ("ПРИВЕТ", "'П' (U+041F CYRILLIC CAPITAL LETTER PE), 'Р'", "lang: ru"),
    ("OPEN откры", "'о' (U+043E CYRILLIC SMALL LETTER O)", "lang: ru"),
    ("مرحبا", "U+0645 ARABIC LETTER MEEM", "lang: ar"),
    ("ΚΑΛΗΜΕΡΑ", "'Κ' (U+039A GREEK CAPITAL LETTER KAPPA)", "lang: el"),  # read as Latin letters
    ("καλημέρα", "'έ' (U+03AD GREEK SMALL LETTER EPSILON WITH TONOS)", "lang: el"),
    ("안녕", "HANGUL SYLLABLE", "lang: korean"),
    ("नमस्ते", "DEVANAGARI LETTER NA", "lang: hi"),
    ("สวัสดี", "THAI CHARACTER", "lang: th"),
    ("A\u00a0B", "U+00A0 NO-BREAK SPACE", "write the text with other characters"),
    ("cafe\u0301", "U+0301 COMBINING ACUTE ACCENT", "write the text with other characters"),
    ("שלום", "HEBREW LETTER", "write the text with other characters"),
    ("ПАغ", "U+041F", "write the text with other characters"),  # of two scripts
])
def test_characters_that_the_recogniser_never_gives_are_named(target, found, way):
    problem = reward_class("ocr").check_prompt(f'a sign "{target}"', {})
    assert found in problem and way in problem
    assert "mode: full" not in problem or way.startswith("write")
    recognition = reward_class("ocr").check_prompt(f'a sign "{target}"', {}, mode="recognition")
    assert ("mode: full and lang" in recognition) == ("lang: " in way)


@pytest.mark.parametrize("target", [
    "Crème brûlée", "Łódź", "straße", "¿Qué?", "50% OFF – today’s “deal”", "π = 3.14", "αβγ", "Ω", "東京タワー", "24/7 ★ ♥"])
def test_what_the_shipped_recogniser_reads_is_taken(target):
    assert reward_class("ocr").check_prompt(f'a sign "{target}"', {}) is None


def test_only_what_is_compared_has_to_be_read():
    assert reward_class("ocr").check_prompt('a sign "OPEN №\u00a05"', {}, normalize="alnum") is None


def test_the_model_folder_decides(tmp_path):
    (tmp_path / "inference.yml").write_text("PostProcess: {character_dict: [п, р, и, в, е, т, ή, Κ]}\n", encoding="utf-8")
    check = reward_class("ocr").check_prompt
    assert check('a sign "ПРИВЕТ Κ"', {}, rec_model_dir=str(tmp_path)) is None
    assert "'A' (U+0041 LATIN CAPITAL LETTER A)" in check('a sign "ПA"', {}, rec_model_dir=str(tmp_path))
    # A model that is not here is checked by the actor.
    for options in ({"lang": "ru"}, {"engine": "paddle"}, {"rec_model_dir": str(tmp_path / "elsewhere")}):
        assert check('a sign "ПРИВЕТ"', {}, **options) is None
