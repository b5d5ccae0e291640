"""What the driver does with the commands that its control actor takes: scale, checkpoint, stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.control import Control, NoControl, Request
from actors.status import run_status
from flowgrpo_ray import storage
from flowgrpo_ray.errors import ConfigError, FlowGrpoError, described, message_of
from flowgrpo_ray.signals import StopRequested

if TYPE_CHECKING:
    from actors.controller import Controller


class Commands:
    """Carries out the commands to one run.

    Nothing here changes a result: `scale` changes who does the work, `checkpoint` and `stop` come between two steps, and
    `stop --now` ends a run as SIGTERM does.

    Attributes:
        control: the connection to the clients.
        stopping: a stop has been asked for.
        ending: the run is on its way out, and no command can end it any more.
    """

    def __init__(self, controller: Controller, *, reachable: bool = True) -> None:
        self._controller = controller
        self.stopping = self.ending = False
        self._to_save: list[Request] = []
        run_id = controller.recorder.run_id
        self.control: Control | NoControl = Control(run_id, self._status, self._obey) if reachable else NoControl()

    def _status(self) -> dict:
        return run_status(self._controller).to_json()

    def _obey(self, request: Request) -> None:
        try:
            {"scale": self._scale, "checkpoint": self._checkpoint, "stop": self._stop}[request.command](request)
        except KeyError:
            self.control.reply(request, f"this run knows no command {request.command!r}: it is of another version", 1)

    # Commands ---------------------------------------------------------------------------------------------------------

    def _scale(self, request: Request) -> None:
        if self._controller.activity.phase == "starting":
            self.control.reply(request, "the run is starting: it can be scaled once its actors are up (`flowgrpo-ray status` "
                                        "shows the phase)", 1)
            return
        try:
            self.control.reply(request, self._controller.scale(request.args["targets"]))
        except FlowGrpoError as error:
            self.control.reply(request, message_of(error), 2 if isinstance(error, ConfigError) else 1)

    def _checkpoint(self, request: Request) -> None:
        last = self._controller.last
        if last.checkpoint is not None and last.finished == last.saved > 0:
            self.control.reply(request, f"step {last.saved} is the last finished step, and its checkpoint exists: "
                                        f"{storage.display(last.checkpoint.uri)}")
            return
        self._to_save.append(request)
        self.control.reply(request, f"waiting for the checkpoint of {self._next_save()}", final=False)

    def _stop(self, request: Request) -> None:
        controller = self._controller
        now = request.args.get("now") or controller.activity.phase == "starting"
        self.stopping = True
        if not now:
            when = f"after the checkpoint of {self._next_save()}" if controller.step_begun else "before its next step"
            self.control.reply(request, f"the run stops {when}", final=False)
            return
        self.control.reply(request, "the run stops now", final=False)
        if not self.ending:
            raise self.stopped()

    def _next_save(self) -> str:
        last = self._controller.last
        if self._controller.activity.phase == "checkpointing":
            return f"step {last.finished}"
        return f"step {last.finished + 1}, when that is finished"

    # The driver's loop ------------------------------------------------------------------------------------------------

    @property
    def want_checkpoint(self) -> bool:
        """Whether a step that has just been finished gets a checkpoint because of a command."""
        return self.stopping or bool(self._to_save)

    def saved(self) -> None:
        """A checkpoint is committed."""
        checkpoint = self._controller.last.checkpoint
        for request in self._to_save:
            assert checkpoint is not None
            self.control.reply(request, f"checkpoint of step {checkpoint.step}: {storage.display(checkpoint.uri)}")
        self._to_save.clear()

    def check_stop(self) -> None:
        """Between two steps. Raises StopRequested if the run has to stop here."""
        if self.stopping:
            raise self.stopped()

    def stopped(self) -> StopRequested:
        """What to raise at the end of a run that was stopped: how far it came, and how to go on."""
        last, steps = self._controller.last, self._controller.config.run.steps
        lost = f" ({last.lost()})" if last.lost() else ""
        return StopRequested(f"stopped on request at step {last.saved} of {steps}{lost}; the same command resumes from there")

    def close(self, error: BaseException | None) -> None:
        """The run ends, with this error or well: clients are told."""
        if isinstance(self.control, NoControl):
            return
        step = self._controller.last.finished
        if isinstance(error, StopRequested):
            text, code = str(error), 0
        elif error is None:
            text, code = f"the run ended with its last step, {step}", 0
        elif isinstance(error, Exception):
            text, code = f"the run failed: {described(error)}", 1
        else:
            text, code = f"the run was ended by a signal; the newest checkpoint is of step {self._controller.last.saved}", 1
        status = self._status() | {"phase": "ended", "waiting_for": text}
        self.control.close(text, code, status)
