import pytest

from flowgrpo_ray.rewards import RewardError, reward_class
from flowgrpo_ray.rewards.ocr import normalized, target_text, text_score


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
    ('the word "日本"', {"normalize": "alnum"}, "'日本' is empty under normalize: alnum"),
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
