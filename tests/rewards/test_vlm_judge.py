import base64
import io
import json
import threading

import numpy as np
import pytest
from answering import Server, serving
from PIL import Image

from flowgrpo_ray import rewards
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.rewards import RewardError
from flowgrpo_ray.rewards.vlm_chat import extract, to_number
from flowgrpo_ray.rewards.vlm_judge import JUDGE_TEMPLATE, QWEN_TEMPLATE, UNIFIED_TEMPLATE

RED_AND_BLUE = np.zeros((2, 8, 12, 3), np.uint8)
RED_AND_BLUE[0, ..., 0] = RED_AND_BLUE[1, ..., 2] = 255
PROMPTS = ["a red square", 'the word "{prompt}"']


def images_of(body):
    """What an endpoint sees: RGB images of a request."""
    urls = [part["image_url"]["url"] for part in body["messages"][0]["content"] if part["type"] == "image_url"]
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))) for url in urls]


def text_of(body):
    return body["messages"][0]["content"][-1]["text"]


def whole(said, reason="stop"):
    return {"choices": [{"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": said}}]}


def endpoint(reply, models=("judge",)):
    """An OpenAI-compatible endpoint; `reply(body)` is the text, or (status, body) of the whole answer."""
    def answer(method, path, body):
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": name} for name in models]}
        if path != "/v1/chat/completions":
            return 404, {"error": {"message": f"no {path}"}}
        said = reply(body)
        if isinstance(said, tuple):
            return said
        return 200, whole(said)

    return serving(answer)


def judge(server, name="vlm_judge", **options):
    return rewards.get(name, base_url=f"{server.url}/v1", **{"retries": 1, "backoff_s": 0.0, "timeout_s": 5.0} | options)


def score(reward, images=RED_AND_BLUE, prompts=PROMPTS):
    return reward.score(images, prompts, [{}] * len(images))


def by_red(body):
    """5 for a red image, 1 for one without red, as JSON."""
    return json.dumps({"score": 1 + 4 * float(images_of(body)[0][..., 0].mean()) / 255})


def test_grades_become_scores_in_0_to_1():
    with endpoint(by_red) as server:
        reward = judge(server)
        found = score(reward)
        assert reward.range == (0, 1)
    assert list(found) == ["vlm_judge"] and found["vlm_judge"].dtype == np.float32
    assert found["vlm_judge"].tolist() == [1, 0]


def test_the_request_is_that_of_the_chat_api():
    with endpoint(by_red) as server:
        score(judge(server, concurrency=1, max_tokens=77))
        bodies = [body for _, path, body, _ in server.requests if path == "/v1/chat/completions"]
    assert [text_of(body) for body in bodies] == [JUDGE_TEMPLATE.replace("{prompt}", prompt) for prompt in PROMPTS]
    assert all(np.array_equal(images_of(body)[0], image) for body, image in zip(bodies, RED_AND_BLUE, strict=True))
    assert {key: bodies[0][key] for key in ("model", "temperature", "max_tokens")} == {
        "model": "judge", "temperature": 0.0, "max_tokens": 77}
    schema = bodies[0]["response_format"]["json_schema"]
    assert bodies[0]["response_format"]["type"] == "json_schema" and schema["strict"] is True
    assert schema["schema"] == {"type": "object", "required": ["score"], "additionalProperties": False,
                                "properties": {"score": {"type": "number", "minimum": 1, "maximum": 5}}}


def test_large_images_are_scaled_down_and_small_ones_are_not():
    large = np.zeros((1, 30, 60, 3), np.uint8)
    large[..., 1] = 200
    for size, shape in [(20, (10, 20, 3)), (100, (30, 60, 3)), (0, (30, 60, 3))]:
        with endpoint(by_red) as server:
            score(judge(server, image_size=size), large, ["x"])
            (image,) = images_of(server.requests[-1][2])
            assert image.shape == shape and np.unique(image.reshape(-1, 3), axis=0).tolist() == [[0, 200, 0]]


# Structured output ----------------------------------------------------------------------------------------------------

def without_schema(body):
    if "response_format" in body:
        return 400, {"error": {"message": "response_format of type json_schema is not supported", "type": "BadRequestError"}}
    return by_red(body)


def test_a_server_without_structured_output_is_asked_without_it_and_that_is_noted_once():
    with endpoint(without_schema) as server:
        reward = judge(server)
        for _ in range(3):
            assert score(reward)["vlm_judge"].tolist() == [1, 0]
        sent = ["response_format" in body for _, path, body, _ in server.requests if path == "/v1/chat/completions"]
    assert sum(sent) <= 2 and not any(sent[4:])
    (note,) = reward.notes
    assert "/v1 has no structured output (response_format of type json_schema is not supported); without it" in note
    with endpoint(by_red) as server:
        reward = judge(server)
        assert score(reward)["vlm_judge"].tolist() == [1, 0] and reward.notes == ()


def test_insisting_on_structured_output_is_an_error_without_it():
    with endpoint(without_schema) as server, pytest.raises(RewardError, match="image 0: .*HTTP 400.*json_schema"):
        score(judge(server, structured="json_schema"))


@pytest.mark.parametrize(("status", "message"), [
    (400, "the prompt is too long"), (422, "json_schema?"), (500, "json_schema failed"),
])
def test_any_other_refusal_is_an_error(status, message):
    with endpoint(lambda body: (status, {"error": {"message": message}})) as server:
        with pytest.raises(RewardError, match=f"HTTP {status}"):
            score(judge(server, concurrency=1))
        assert all("response_format" in body for _, path, body, _ in server.requests if body)


@pytest.mark.parametrize("options", [{"structured": "never"}, {"parser": "number"}, {"parser": r"regex:(\d)"}])
def test_no_schema_where_none_is_wanted(options):
    with endpoint(lambda body: '{"score": 3}' if options == {"structured": "never"} else "3") as server:
        assert score(judge(server, **options))["vlm_judge"].tolist() == [0.5, 0.5]
        assert "response_format" not in server.requests[-1][2]


# Replies --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("parser", "reply", "value"), [
    ("json:score", '{"score": 3.5}', 3.5),
    ("json:score", ' {"why": "x", "score": "4"} \n', "4"),
    ("json:score", 'My verdict:\n```json\n{"score": 2}\n```\nGood day.', 2),
    ("number", " 4.25\n", "4.25"),
    (r"regex:Final Score:\s*([\d.]+)", "Final Score: 1 ... no.\nFinal Score: 2.5", "2.5"),
    (r"regex:Score: (\d+)", "A Score: 4, as I said. Score: 4", "4"),
    (r"regex:Score: (\d+)", "Score: 1 is poor.\n - **Score: 4**", "4"),
    (r"regex:Score: (\d+)", "Score: 1 is poor.\n## 2. Score: 4.", "4"),
    (r"regex:\s(\d)/10", "light 7/10\n8/10", "8"), (r"regex:(\d+\.\d+)", "I say 4.5.", "4.5"), (r"regex:(\d)$", "1. 4", "4"),
    (r"regex:(first|second)", "the first, and so the first", "first"),
    (r"regex:(?:Score: (\d))?$", "none", ""),
])
def test_extract(parser, reply, value):
    assert extract(reply, parser) == value


@pytest.mark.parametrize(("parser", "reply"), [
    ("json:score", "3.5"), ("json:score", "score: 3"), ("json:score", '{"grade": 3}'), ("json:score", '{"score": NaN}'),
    ("json:score", "```\n{}\n```\n```\n{}\n```"), (r"regex:Score: (\d)", "no idea"), (r"regex:Score: (\d)", "score: 3"),
    ("json:score", '{"score": 1, "score": 5}'), ("json:score", '{"score": 4'),
    (r"regex:Score: (\d)", "A Score: 1 would be poor, and a Score: 5 excellent."),
    (r"regex:Score: (\d)", "Score: 4. A Score: 5 would be excellent."),
    (r"regex:(\d)/5", "Score: 4.5/5"), (r"regex:(\d)$", "Score: 4,5"), (r"regex:(\d)/10", "10/10"),
    (r"regex:Score: (\d)", "Score: 4.5"), (r"regex:Score: (\d)", "Score: 4,5"), (r"regex:Score: (\d)", "Score: 12"),
    (r"regex:(first|second)", "the first is good, and the second is better"),
])
def test_extract_invents_nothing(parser, reply):
    with pytest.raises(ValueError):
        extract(reply, parser)


@pytest.mark.parametrize("value", ["", "four", "4/5", "4,5", "4_5", "nan", "inf", "1e999", 10**400, True, None, [4], {}])
def test_what_is_no_number(value):
    with pytest.raises(ValueError):
        to_number(value)


@pytest.mark.parametrize(("reply", "message"), [
    ("I like it.", "image 0: .*no verdict in the model's reply .*'I like it.'"),
    ('{"score": null}', "None is no number"),
    ('{"score": 5.5}', "5.5 is outside 1 to 5"),
    ('{"score": 0}', "0 is outside 1 to 5"),
    ('{"score": true}', "True is no number"),
    ("", "reply is empty"),
    (" \n", "reply is empty"),
    (None, "reply is empty"),
    ((200, {"choices": []}), "holds no reply"),
    ((200, []), "holds no reply"),
    ((200, {"error": "busy"}), "holds no reply"),
    ((200, b"<html>"), "is no JSON"),
    ((500, {"error": {"message": "out of memory"}}), "HTTP 500: out of memory"),
    ((503, {}), r"HTTP 503.*\(tried 2 times\)"),
    ((200, Server.CLOSE), r"lost.*\(tried 2 times\)"),
])
def test_a_reply_without_a_grade_is_an_error_and_never_a_0(reply, message):
    with endpoint(lambda body: reply) as server, pytest.raises(RewardError, match=message):
        score(judge(server))


@pytest.mark.parametrize(("name", "said", "reason", "message"), [
    ("vlm_judge", '{"score": 4}', "length", "option max_tokens is 77, give it more.*It ends: '{\"score\": 4}'"),
    ("unified_reward", "x" * 900 + "Final Score: 4", "length", r"max_tokens is 77.*It ends: '\.\.\.x{186}Final Score: 4'"),
    ("qwen_vl", "A Score: 5", "content_filter", r"cut off \(finish_reason 'content_filter'\)\. It ends: 'A Score: 5'"),
    ("qwen_vl", "Score: 5", "abort", r"cut off \(finish_reason 'abort'\)"),
    ("vlm_judge", None, "length", "max_tokens is 77"),
])
def test_a_reply_that_is_cut_off_is_an_error(name, said, reason, message):
    with endpoint(lambda body: (200, whole(said, reason))) as server, pytest.raises(RewardError, match=f"image 0: .*{message}"):
        score(judge(server, name, max_tokens=77))


@pytest.mark.parametrize("reason", ["stop", "eos_token", None])
def test_a_whole_reply_is_taken(reason):
    with endpoint(lambda body: (200, whole('{"score": 4}', reason))) as server:
        assert score(judge(server))["vlm_judge"].tolist() == [0.75] * 2


def test_no_reply_in_time_is_an_error():
    with endpoint(lambda body: (200, Server.HANG)) as server:
        with pytest.raises(RewardError, match="no answer from .* within 0.2 s"):
            score(judge(server, timeout_s=0.2))


def test_one_bad_reply_fails_the_batch_and_names_the_image():
    with endpoint(lambda body: by_red(body) if images_of(body)[0][0, 0, 0] else "?") as server:
        with pytest.raises(RewardError, match="image 1: .*no verdict"):
            score(judge(server))
        assert score(judge(server), RED_AND_BLUE[:1], PROMPTS[:1])["vlm_judge"].tolist() == [1]


def test_requests_run_side_by_side_and_answers_keep_their_places():
    meeting = threading.Barrier(3, timeout=20)

    def reply(body):
        meeting.wait()
        return text_of(body)

    images = np.zeros((6, 4, 4, 3), np.uint8)
    with endpoint(reply) as server:
        reward = judge(server, concurrency=3, parser="number", template="{prompt}", scale=[0, 10])
        found = score(reward, images, [str(i) for i in range(6)])["vlm_judge"]
    assert np.allclose(found, np.arange(6) / 10)


# Options --------------------------------------------------------------------------------------------------------------

URL = {"base_url": "http://127.0.0.1:1/v1"}


@pytest.mark.parametrize(("options", "message"), [
    ({}, "option base_url is needed"),
    ({"base_url": "127.0.0.1:8000"}, "not of the form http://"),
    (URL | {"template": "grade it"}, "option template lacks {prompt}"),
    (URL | {"template": "grade {promt} and {prompt}"}, "the field {promt}; did you mean prompt?"),
    (URL | {"template": ""}, "template"),
    (URL | {"parser": "jsn:score"}, "option parser is 'jsn:score'; it is one of json:FIELD, regex:PATTERN, number"),
    (URL | {"parser": "json:"}, "option parser is 'json:'"),
    (URL | {"parser": r"regex:(\d"}, "no regular expression"),
    (URL | {"parser": r"regex:\d"}, "has 0 groups"),
    (URL | {"parser": r"regex:(\d)/(\d)"}, "has 2 groups"),
    (URL | {"scale": [5, 1]}, "option scale is [5, 1], not [low, high]"),
    (URL | {"scale": [1, 2, 3]}, "option scale"),
    (URL | {"bounds": ["1", 5]}, "option bounds"),
    (URL | {"structured": "json_schema", "parser": "number"}, "structured: json_schema goes with a json: parser"),
    (URL | {"api_key_env": "sk-very-secret"}, "option api_key_env is not the name"),
    (URL | {"temperature": -1}, "option temperature is -1"),
])
def test_wrong_options_are_named_before_anything_starts(options, message):
    problems = rewards.option_problems("vlm_judge", options)
    assert message in problems[0] and "very-secret" not in str(problems)


def test_braces_of_json_in_a_template_are_text():
    assert rewards.option_problems("vlm_judge", URL | {"template": 'Grade {prompt}: {"score": 1, "a": {}}'}) == []


def test_the_key_comes_from_the_environment(monkeypatch):
    with endpoint(by_red) as server:
        with pytest.raises(RewardError, match=r"the environment variable JUDGE_KEY \(option api_key_env\) is not set"):
            judge(server, api_key_env="JUDGE_KEY")
        for wrong in ("sk-1\nHost: elsewhere", "sk-\u00fc"):
            monkeypatch.setenv("JUDGE_KEY", wrong)
            with pytest.raises(RewardError, match="JUDGE_KEY .* holds characters that no key has") as error:
                judge(server, api_key_env="JUDGE_KEY")
            assert "sk-" not in str(error.value)
        monkeypatch.setenv("JUDGE_KEY", "sk-1\n")
        score(judge(server, api_key_env="JUDGE_KEY"))
        assert all(headers["Authorization"] == "Bearer sk-1" for *_, headers in server.requests)


def test_the_model_is_the_one_that_is_served_or_named():
    with endpoint(by_red, models=("qwen", "llama")) as server:
        with pytest.raises(RewardError, match="serves 2 models; option model names one of qwen, llama"):
            judge(server)
        with pytest.raises(RewardError, match="serves no model 'qwem'; did you mean qwen"):
            judge(server, model="qwem")
        score(judge(server, model="llama"))
        assert server.requests[-1][2]["model"] == "llama"


def test_an_endpoint_that_is_none_is_named_at_construction():
    with serving(lambda *_: (200, {"status": "ok"})) as server, pytest.raises(RewardError, match="/v1/models is not that of"):
        judge(server)
    with pytest.raises(RewardError, match=f"{server.url}/v1/models: .*refused"):
        judge(server)
    with pytest.raises(ConfigError):
        rewards.get("vlm_judge")


def test_self_test_knows_red_from_blue():
    with endpoint(by_red) as server:
        judge(server).self_test()
    with endpoint(lambda body: '{"score": 3}') as server:
        with pytest.raises(RewardError, match="from high to low"):
            judge(server).self_test()
        judge(server, template="Is this nice? {prompt}").self_test()


# Presets --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("name", "reply", "expected"), [
    ("unified_reward", "Good match.\nFinal Score: 4", 0.8),
    ("unified_reward", "Alignment Score: 1\n**Final Score:** 3.5", 0.7),
    ("unified_reward", "a cat (object): 1\nFinal Score: 4.5", 0.9),
    ("unified_reward", "**Final Score:** 4/5", 0.8),
    ("unified_reward", "**Final Score**: **4.5**", 0.9),
    ("unified_reward", "### Final Score:\n4.25", 0.85),
    ("unified_reward", "It is good. Final Score: 4 out of 5.", 0.8),
    ("unified_reward", "Final Score: 2? No.\n- Final Score: 4.\n\n3 cats are asked for.", 0.8),
    ("qwen_vl", "Sharp and calm.\nScore: 5", 1.0),
    ("qwen_vl", "Sharp.\nOverall Score: 5.0 / 5", 1.0),
    ("qwen_vl", "Composition Score: 2, light Score: 4\nScore: 3\n\n- 4 out of 5 would do it more than justice", 0.6),
    ("qwen_vl", "**Score: 1**", 0.2), ("qwen_vl", "Score: 4, because the light is fine.", 0.8),
])
def test_presets_divide_by_5(name, reply, expected):
    with endpoint(lambda body: reply) as server:
        reward = judge(server, name)
        found = score(reward)
        assert reward.range == (0.2, 1.0) == rewards.reward_class(name).range
        assert "response_format" not in server.requests[-1][2]
    assert list(found) == [name] and np.allclose(found[name], expected)


@pytest.mark.parametrize(("name", "reply"), [
    ("unified_reward", "4"), ("unified_reward", "Final Score: 0.5"), ("unified_reward", "Final Score: 9"),
    ("unified_reward", "Final Score: high"), ("qwen_vl", "no score"), ("qwen_vl", "Score: 7"),
    ("unified_reward", "Final Score: 4,5"), ("unified_reward", "Final Score: 4, 5"), ("unified_reward", "Final Score: 4/10"),
    ("unified_reward", "Final Score: 4 out of 10"), ("unified_reward", "Final Score: 4-5"), ("qwen_vl", "Score: 3 to 4"),
    ("qwen_vl", "Score: 3.5.1"), ("qwen_vl", "A Score: 1 would mean poor, a Score: 5 excellent. The composition is"),
    ("qwen_vl", "A Score: 1 would mean poor. I say Score: 4,5"),
])
def test_presets_refuse_what_is_no_grade(name, reply):
    with endpoint(lambda body: reply) as server, pytest.raises(RewardError, match="no verdict"):
        score(judge(server, name))


def test_preset_templates():
    with endpoint(lambda body: "Final Score: 2\nScore: 2") as server:
        for name, template in [("unified_reward", UNIFIED_TEMPLATE), ("qwen_vl", QWEN_TEMPLATE)]:
            score(judge(server, name), RED_AND_BLUE[:1], ["a cat"])
            assert text_of(server.requests[-1][2]) == template.replace("{prompt}", "a cat")
    assert "{prompt}" not in QWEN_TEMPLATE
    assert rewards.option_problems("qwen_vl", URL | {"template": "Is {prompt} there? Score: "}) == []
