import numpy as np
import pytest
from PIL import Image

from flowgrpo_ray import rewards
from flowgrpo_ray.rewards import RewardError, ocr_models

WORDS = """ACT AGE AIR ANT ART BAG BAR BAT BED BEE BOX BUS CAP CAT COW DAY DEN DOG EAR EGG FAN FIG FOX GAP HAT HEN ICE
INK JAM JAR KEY LEG LIP MAP MIX NET NUT OAK OWL PEN PIG RAT RED SEA SKY SUN TEA VAN WAX WIN ZOO ACID BABY BELL BIRD BLUE
BOOK CAKE CITY CLUB DARK DESK DOOR DUCK ECHO EXIT FARM FISH FROG GATE GOLD HAND HAWK HOME JUMP KITE LAMP LION MILK MOON
NEST OVEN PARK POND QUIZ RAIN ROAD SHIP SNOW STAR TREE VASE WAVE WOLF YARD ZERO""".split()


@pytest.fixture(scope="module")
def recognition():
    return rewards.get("ocr", mode="recognition", normalize="alnum")


@pytest.fixture(scope="module")
def full():
    return rewards.get("ocr")


def score(reward, images, targets):
    result = reward.score(np.stack(images), [f'the word "{target}"' for target in targets], [{}] * len(targets))
    assert list(result) == ["ocr", "ocr_exact"] and all(values.dtype == np.float32 for values in result.values())
    checked = rewards.validated(result, len(targets), "ocr")
    return checked["ocr"].tolist(), checked["ocr_exact"].tolist()


@pytest.mark.parametrize("mode", ["full", "recognition"])
@pytest.mark.parametrize("normalize", ["reference", "alnum"])
def test_a_word_is_read_in_every_mode(mode, normalize, draw_word):
    reward = rewards.get("ocr", mode=mode, normalize=normalize)
    images = [draw_word("LAMP"), draw_word("FISH"), draw_word("KEY")]
    assert score(reward, images, ["lamp", "FISK", "WOLF"]) == ([1.0, 0.75, 0.0], [1.0, 0.0, 0.0])


@pytest.mark.parametrize("options", [{}, {"width": 80}])
def test_clean_words_are_read_exactly(options, draw_word):
    reward = rewards.get("ocr", mode="recognition", normalize="alnum", **options)
    scores, exact = score(reward, [draw_word(word) for word in WORDS], WORDS)
    assert np.mean(exact) >= 0.99 and np.mean(scores) >= 0.99


def test_the_two_rules_differ_where_they_should(draw_word, recognition):
    reference = rewards.get("ocr", mode="recognition", normalize="reference")
    assert score(reference, [draw_word("FARM")], ["ARM"]) == ([1.0], [0.0])
    assert score(recognition, [draw_word("FARM")], ["ARM"]) == ([pytest.approx(2 / 3)], [0.0])


def test_full_mode_finds_lines_and_joins_them_in_reading_order(draw_page, full):
    page = draw_page("New York", "Open 24 hours")
    assert [text.replace(" ", "") for text, _ in full.read(page[None])[0]] == ["NewYork", "Open24hours"]
    assert score(full, [page] * 3, ["new york open 24 hours", "Open 24 hours", "Paris"]) == (
        [1.0, 1.0, 0.0], [1.0, 0.0, 0.0])


def test_no_text_is_an_empty_reading_and_scores_zero(full):
    blank = np.full((64, 64, 3), 200, np.uint8)
    assert full.read(blank[None]) == [[]]
    assert score(full, [blank], ["CAT"]) == ([0.0], [0.0])


def test_an_empty_batch_reads_nothing(full, recognition):
    for reward in (full, recognition):
        result = reward.score(np.zeros((0, 32, 64, 3), np.uint8), [], [])
        assert [values.shape for values in result.values()] == [(0,), (0,)]


def test_colours_arrive_in_the_order_of_an_image_file(draw_word, draw_page, full, recognition, tmp_path):
    """PaddleOCR decodes an image file itself: what it reads there is the truth for our arrays."""
    red_on_blue = {"ink": (255, 0, 0), "paper": (0, 40, 255)}
    for reward, image in ((recognition, draw_word("CAT", **red_on_blue)), (full, draw_page("CAT", **red_on_blue))):
        Image.fromarray(image).save(tmp_path / "red.png")
        (result,) = reward._model.predict(str(tmp_path / "red.png"))
        texts, confidences = result["rec_text" if reward is recognition else "rec_texts"], result[
            "rec_score" if reward is recognition else "rec_scores"]
        truth = [(texts, confidences)] if reward is recognition else list(zip(texts, confidences, strict=True))
        swapped = np.ascontiguousarray(image[:, :, ::-1])
        assert reward.read(image[None]) == [truth]
        assert reward.read(swapped[None]) != [truth]


def test_a_reading_does_not_depend_on_its_companions(draw_word, draw_page, full, recognition):
    for reward, draw, words in ((recognition, draw_word, WORDS[:12]), (full, draw_page, WORDS[:3])):
        images = np.stack([draw(word) for word in words])
        alone = reward.read(np.stack([images[0]] * len(words)))[0]
        together, turned = reward.read(images), reward.read(images[::-1])
        assert together[0] == alone
        assert turned[::-1] == together


def test_batches_keep_the_order(draw_word):
    reward = rewards.get("ocr", mode="recognition", normalize="alnum", batch_size=2)
    images = [draw_word(word) for word in WORDS[:5]]
    assert [lines[0][0] for lines in reward.read(np.stack(images))] == WORDS[:5]
    assert score(reward, images, WORDS[:5])[1] == [1.0] * 5


def test_a_failure_of_ocr_is_raised_and_not_scored(full, recognition):
    for reward in (full, recognition):
        with pytest.raises((ValueError, ZeroDivisionError)):  # PaddleOCR's own
            reward.score(np.zeros((2, 0, 64, 3), np.uint8), ['"A"', '"B"'], [{}, {}])


def test_a_prompt_without_quotes_is_an_error(draw_word, recognition):
    images = np.stack([draw_word("CAT")] * 2)
    with pytest.raises(RewardError, match="prompt 'the word CAT': ocr needs the text to be read in double quotes"):
        recognition.score(images, ['the word "CAT"', "the word CAT"], [{}, {}])


def test_the_loaded_models_say_what_they_can_read(full, recognition):
    for reward in (full, recognition):
        assert reward._characters == ocr_models.characters() | {" "}


def test_a_text_that_the_loaded_model_cannot_read_is_an_error_and_not_zero(draw_word, monkeypatch):
    """With `lang` PaddleOCR downloads the model, so that the driver knows nothing of it."""
    reward = rewards.get("ocr", mode="recognition")
    monkeypatch.setattr(type(reward), "check_prompt", classmethod(lambda *args, **options: None))
    with pytest.raises(RewardError, match="the recogniser cannot read 'П'"):
        reward.score(np.stack([draw_word("CAT")]), ['the word "П"'], [{}])


def test_model_folders_can_be_given(draw_word, monkeypatch):
    det, rec = ocr_models.model_dir(ocr_models.DETECTION), ocr_models.model_dir(ocr_models.RECOGNITION)
    monkeypatch.setitem(ocr_models._FILES, ocr_models.DETECTION, "gone.onnx")
    monkeypatch.setitem(ocr_models._FILES, ocr_models.RECOGNITION, "gone.onnx")
    for options in ({"det_model_dir": str(det)}, {"mode": "recognition"}):
        reward = rewards.get("ocr", rec_model_dir=str(rec), **options)
        assert score(reward, [draw_word("CAT")], ["CAT"]) == ([1.0], [1.0])


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_reach_onnxruntime(threads):
    recogniser = rewards.get("ocr", mode="recognition", threads=threads)._model.paddlex_predictor
    pipeline = rewards.get("ocr", threads=threads)._model.paddlex_pipeline._pipeline
    for model in (recogniser, pipeline.text_det_model, pipeline.text_rec_model):
        assert model.runner.session.get_session_options().intra_op_num_threads == threads


def test_a_video_scores_the_mean_of_its_sampled_frames(draw_word, recognition):
    video = np.stack([draw_word(word) for word in ("LAMP", "XXXX", "FISH", "LAMP", "LIMP")])
    reward = rewards.get("video_ocr", mode="recognition", normalize="alnum", every=2)
    result = reward.score(np.stack([video, video]), ['"LAMP"', '"FISH"'], [{}, {}])
    expected = [[recognition.score(video[None, i], [prompt], [{}])["ocr"][0] for i in (0, 2, 4)]
                for prompt in ('"LAMP"', '"FISH"')]
    assert result["video_ocr"].tolist() == pytest.approx(np.mean(expected, axis=1).tolist())
    assert result["video_ocr_exact"].tolist() == pytest.approx([1 / 3, 1 / 3])
    with pytest.raises(RewardError, match=r"\[n, T, H, W, 3\] in RGB, not uint8 \[5, 32, 64, 3\]"):
        reward.score(video, ['"LAMP"'] * 5, [{}] * 5)


@pytest.mark.parametrize("name", ["ocr", "video_ocr"])
@pytest.mark.parametrize("options", [{}, {"mode": "recognition"}, {"mode": "recognition", "normalize": "alnum", "width": 80}])
def test_the_self_test_passes_and_notices_a_reader_that_cannot_read(name, options, monkeypatch):
    reward = rewards.get(name, **options)
    reward.self_test()
    monkeypatch.setattr(type(reward), "read", lambda self, images: [[("", 0.0)]] * len(images))
    with pytest.raises(RewardError, match="fails its self-test"):
        reward.self_test()


def test_the_paddle_engine_says_what_it_needs():
    assert rewards.option_problems("ocr", {"engine": "paddle", "mode": "recognition"}) == [
        "reward ocr: the shipped model is for onnxruntime; with engine: paddle give rec_model_dir"]
    (problem,) = rewards.option_problems("ocr", {"lang": "fr", "mode": "recognition"})
    assert "option lang means nothing with mode: recognition" in problem
    if ocr_models.importlib.util.find_spec("paddle") is None:
        with pytest.raises(RewardError, match="engine: paddle needs paddlepaddle"):
            rewards.get("ocr", engine="paddle")
