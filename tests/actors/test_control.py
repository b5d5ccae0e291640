"""Commands to a run: each is carried out once, whatever becomes of the control actor, and none changes a bit."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
import ray
from fake_ray import FakeRay, Handle
from ray.exceptions import RayActorError
from runs import Watcher, assert_same_bits, run, small_config

from actors import control
from actors.commands import Commands
from actors.control import Control, ControlActor, Request
from actors.last_step import LastStep, Saved
from actors.status import Activity
from flowgrpo_ray.cluster import commands, reach
from flowgrpo_ray.errors import ConfigError
from flowgrpo_ray.run_dir.checkpoint import latest
from flowgrpo_ray.signals import StopRequested

# The actor ------------------------------------------------------------------------------------------------------------


def reply(text: str, *, final: bool = True) -> dict:
    return {"text": text, "code": 0, "final": final}


def test_a_command_reaches_the_driver_once_and_each_reply_its_client():
    async def play():
        actor = ControlActor({"step": 0})
        driver, client = asyncio.ensure_future(actor.take()), asyncio.ensure_future(actor.ask("a", "stop", {"now": True}))
        assert await driver == [{"id": "a", "command": "stop", "args": {"now": True}}]
        again = asyncio.ensure_future(actor.ask("a", "stop", {"now": True}))
        driver = asyncio.ensure_future(actor.take())
        await actor.answer("a", [reply("soon", final=False)])
        assert (await client)["text"] == (await again)["text"] == "soon"
        last = asyncio.ensure_future(actor.ask("a", "stop", {"now": True}, 1))
        await asyncio.sleep(0)
        assert not last.done() and not driver.done(), "nothing is taken twice"
        await actor.answer("a", [reply("soon", final=False), reply("done")])
        assert (await last)["text"] == "done"
        driver.cancel()

    asyncio.run(play())


def test_the_status_has_an_age_and_the_end_of_a_run_waits_for_its_clients():
    async def play():
        actor = ControlActor({"step": 0})
        await actor.push({"step": 1})
        status, age = await actor.status()
        assert status == {"step": 1} and 0 <= age < 60
        watching = asyncio.ensure_future(actor.ended("w"))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(actor.close({"step": 2}))
        assert await watching == {"step": 2}
        await asyncio.sleep(0)
        assert not closing.done(), "an answer that is on its way has not arrived"
        await actor.goodbye("w")
        await closing

    asyncio.run(play())


def test_the_end_of_a_run_waits_for_a_client_that_is_between_two_replies():
    async def play():
        actor = ControlActor({"step": 0})
        client = asyncio.ensure_future(actor.ask("a", "stop", {}))
        await actor.take()
        await actor.answer("a", [reply("soon", final=False)])
        assert (await client)["text"] == "soon"
        await actor.answer("a", [reply("soon", final=False), reply("done")])
        closing = asyncio.ensure_future(actor.close({"step": 2}))
        await asyncio.sleep(0)
        assert not closing.done()
        assert (await actor.ask("a", "stop", {}, 1))["text"] == "done"
        await actor.goodbye("a")
        await closing

    asyncio.run(play())


# The driver's side ----------------------------------------------------------------------------------------------------

class Actors(FakeRay):
    """Ray for the control actors of a run: each is made from the class by its driver, and lives until a test ends it."""

    def __init__(self) -> None:
        self.made: list[Handle] = []
        self.killed: list[Handle] = []
        self.name_taken = False

    def remote(self, cls):
        return self

    def options(self, **options):
        assert options["namespace"] == "flowgrpo" and options["name"] == "flowgrpo-control-1a2b"
        assert options["num_cpus"] == 0
        return SimpleNamespace(remote=self.make)

    def make(self, status):
        if self.name_taken:
            raise ValueError("the name is already taken")
        self.made.append(Handle(lambda method, *args: None))
        return self.made[-1]

    def kill(self, handle):
        self.killed.append(handle)

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "00" * 28)


class Driver:
    """The driver's side of the control, on a clock of the test's."""

    def __init__(self, monkeypatch) -> None:
        self.ray, self.now, self.obeyed = Actors(), 0.0, []
        monkeypatch.setattr(control, "ray", self.ray)
        monkeypatch.setattr(control, "NodeAffinitySchedulingStrategy", lambda node, soft: None)
        monkeypatch.setattr(control.time, "monotonic", lambda: self.now)
        self.control = Control("1a2b", dict, self.obeyed.append)

    def settle(self, after_s: float = 1.0) -> None:
        self.now += after_s
        self.control.settle()

    def calls(self, method: str) -> list:
        return [call for call in self.ray.made[-1].calls if call.method == method]

    def give(self, *ids: str) -> None:
        """Commands of these ids reach the driver."""
        self.calls("take")[-1].refs[0].end([{"id": id, "command": "checkpoint", "args": {}} for id in ids])
        self.settle()

    def die(self) -> None:
        for call in self.ray.made[-1].calls:
            call.refs[0].end(error=RayActorError())
        self.settle()


def test_a_command_is_obeyed_once_though_its_client_asks_the_next_actor_again(monkeypatch):
    driver = Driver(monkeypatch)
    driver.settle()
    driver.give("a")
    (request,) = driver.obeyed
    driver.control.reply(request, "waiting", final=False)
    driver.die()
    driver.settle()
    assert len(driver.ray.made) == 2, "it is made again"
    driver.give("a", "b")
    assert [request.id for request in driver.obeyed] == ["a", "b"]
    assert driver.calls("answer")[0].args == ("a", [{"text": "waiting", "code": 0, "final": False}])
    driver.control.reply(request, "done")
    assert [reply["text"] for reply in driver.calls("answer")[-1].args[1]] == ["waiting", "done"]


def test_an_actor_that_cannot_live_is_made_ever_more_rarely_and_a_hung_one_is_replaced(monkeypatch):
    driver = Driver(monkeypatch)
    for _ in range(200):
        driver.settle()
        if driver.control.refs():
            driver.die()
    assert 5 <= len(driver.ray.made) <= 12
    driver.ray.name_taken = True
    for _ in range(100):
        driver.settle()
    assert not driver.control.refs(), "another driver of the run has the name"
    driver.ray.name_taken = False
    for _ in range(100):
        driver.settle()
    driver.control.push({"step": 1})
    driver.control.push({"step": 2})
    assert len(driver.calls("push")) == 1, "no more than one is under way"
    made = len(driver.ray.made)
    driver.settle(control.HUNG_S + 1)
    driver.settle(control.LONGEST_REST_S + 1)
    assert driver.ray.killed == [driver.ray.made[made - 1]] and len(driver.ray.made) == made + 1


class Line:
    """Stands where the connection to the clients stands."""

    def __init__(self) -> None:
        self.said: list[tuple] = []

    def reply(self, request, text, code=0, *, final=True):
        self.said.append((request.id, text, code, final))


def obeying(
    finished: int, saved: int, phase: str = "sampling", scale=None, step_begun: bool = True
) -> tuple[Commands, Line, LastStep]:
    last = LastStep(saved, grace_s=9.0)
    last.finished = finished
    last.checkpoint = Saved(saved, f"/runs/x/checkpoints/step_{saved}", 10, 0.0) if saved else None
    activity = Activity()
    activity.phase = phase
    controller = SimpleNamespace(last=last, activity=activity, scale=scale, step_begun=step_begun,
                                 recorder=SimpleNamespace(run_id="1a2b"), config=SimpleNamespace(run=SimpleNamespace(steps=30)))
    of_run = Commands(controller)
    of_run.control = line = Line()
    return of_run, line, last


def test_a_checkpoint_comes_after_the_step_in_progress_or_is_there():
    of_run, line, last = obeying(finished=4, saved=2)
    of_run._obey(Request("a", "checkpoint", {}))
    assert line.said == [("a", "waiting for the checkpoint of step 5, when that is finished", 0, False)]
    assert of_run.want_checkpoint
    last.finished = last.saved = 5
    last.checkpoint = Saved(5, "/runs/x/checkpoints/step_5", 10, 0.0)
    of_run.saved()
    assert line.said[1:] == [("a", "checkpoint of step 5: /runs/x/checkpoints/step_5", 0, True)]
    assert not of_run.want_checkpoint
    of_run._obey(Request("b", "checkpoint", {}))
    assert "its checkpoint exists: /runs/x/checkpoints/step_5" in line.said[-1][1] and line.said[-1][3]
    of_run.saved()
    assert len(line.said) == 3, "nobody waits any more"


def test_a_stop_ends_the_run_between_two_steps_and_now_at_once():
    of_run, line, last = obeying(finished=4, saved=4)
    of_run.check_stop()
    of_run._obey(Request("a", "stop", {"now": False}))
    assert line.said == [("a", "the run stops after the checkpoint of step 5, when that is finished", 0, False)]
    assert of_run.want_checkpoint
    last.finished = last.saved = 5
    with pytest.raises(StopRequested, match="stopped on request at step 5 of 30; the same command resumes from there"):
        of_run.check_stop()
    last.finished = 6
    with pytest.raises(StopRequested, match=r"at step 5 of 30 \(step 6 is lost\)"):
        of_run._obey(Request("b", "stop", {"now": True}))
    of_run.ending = True
    of_run._obey(Request("c", "stop", {"now": True}))
    assert line.said[-1] == ("c", "the run stops now", 0, False), "on its way out it is not interrupted again"


def test_a_stop_before_the_first_step_names_no_checkpoint():
    of_run, line, _ = obeying(finished=0, saved=0, phase="evaluating", step_begun=False)
    of_run._obey(Request("a", "stop", {}))
    assert line.said == [("a", "the run stops before its next step", 0, False)] and of_run.stopping


def test_a_run_that_starts_is_stopped_at_once_and_not_scaled():
    of_run, line, _ = obeying(finished=0, saved=0, phase="starting")
    of_run._obey(Request("a", "scale", {"targets": {"rollout": 2}}))
    assert line.said[0][2] == 1 and "the run is starting" in line.said[0][1]
    with pytest.raises(StopRequested):
        of_run._obey(Request("b", "stop", {"now": False}))


def test_what_scale_refuses_is_told_with_exit_code_2():
    def refuse(targets):
        raise ConfigError("pool learner cannot be scaled")

    of_run, line, _ = obeying(finished=4, saved=4, scale=refuse)
    of_run._obey(Request("a", "scale", {"targets": {"learner": 2}}))
    of_run._obey(Request("b", "dance", {}))
    assert line.said == [("a", "pool learner cannot be scaled", 2, True),
                         ("b", "this run knows no command 'dance': it is of another version", 1, True)]


# Real runs ------------------------------------------------------------------------------------------------------------

class Client(Watcher):
    """Gives commands, each from a thread of its own as another process would, when a step has begun."""

    def __init__(self, plan: dict[int, list]) -> None:
        super().__init__()
        self.plan, self.outcomes, self.threads = plan, {}, []

    def activity(self, doing) -> None:
        board = self.controller.board
        for number, command in enumerate(self.plan.pop(board.plan.step + 1, []) if board is not None else []):
            thread = threading.Thread(target=self.give, args=(f"{board.plan.step + 1}.{number}", command), daemon=True)
            thread.start()
            self.threads.append(thread)

    def give(self, key: str, command) -> None:
        said: list[str] = []
        try:
            code = command(said.append)
        except Exception as error:
            code = error
        self.outcomes[key] = (code, said)

    def joined(self) -> dict:
        for thread in self.threads:
            thread.join(60)
        return self.outcomes


@pytest.fixture(scope="module")
def folder(ray_cluster, tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def kill(say) -> int:
    ray.kill(reach.find("told").actor)
    return 0


def test_a_commanded_run_gives_the_same_bits(folder):
    """Status, checkpoint, the control actor killed and made again, stop; resumed, it equals a run that nobody commanded."""
    config = small_config(folder, "told", steps=4)
    client = Client({
        1: [lambda say: commands.status(None, "told", say),
            lambda say: commands.checkpoint(None, str(folder / "told"), say),
            lambda say: commands.runs(None, say)],
        2: [kill, lambda say: commands.checkpoint(None, "told", say)],
        3: [lambda say: commands.status(None, "told", say, as_json=True), lambda say: commands.stop(None, "told", say)],
    })
    with pytest.raises(StopRequested, match="stopped on request at step 3 of 4; the same command resumes from there"):
        run(config, client)
    outcomes, uri = client.joined(), f"{folder}/told/checkpoints/step_"
    assert all(code == 0 for code, _ in outcomes.values()), outcomes
    assert "phase" in outcomes["1.0"][1][0] and str(folder / "told") in outcomes["1.2"][1][0]
    assert outcomes["1.1"][1] == [
        "waiting for the checkpoint of step 1, when that is finished", f"checkpoint of step 1: {uri}1"]
    assert outcomes["2.1"][1][-1] in (f"checkpoint of step 2: {uri}2", f"checkpoint of step 3: {uri}3") or (
        f"its checkpoint exists: {uri}" in outcomes["2.1"][1][-1])
    assert outcomes["3.1"][1][-1].startswith("stopped on request at step 3 of 4")
    assert latest(str(folder / "told")).step == 3 and not reach.living()

    resumed = run(config)
    undisturbed = run(small_config(folder, "undisturbed", steps=4))
    assert_same_bits(resumed.adapter, undisturbed.adapter)
    assert_same_bits(resumed.optimizer, undisturbed.optimizer)
