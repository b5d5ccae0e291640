"""The learner: begin_step, accumulate, apply, export. One instance per rank; without Ray, and the same code in tests.

All ranks get the same calls in the same order. `accumulate` adds the *sum* of the loss over valid samples and window
steps; `apply` divides once by (valid samples x w), whatever the sharding.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from flowgrpo_ray import device as devices
from flowgrpo_ray.config import Config
from flowgrpo_ray.data.plan import RankWork, StepPlan
from flowgrpo_ray.data.trajectory import Arrays, ExportInfo, GroupScores, Trajectory, from_wire
from flowgrpo_ray.errors import CheckpointError, FlowGrpoError, RatioError
from flowgrpo_ray.learning import losses, parallel
from flowgrpo_ray.learning.advantages import History, needs_whole_step, step_advantages
from flowgrpo_ray.learning.diagnostics import Diagnostics
from flowgrpo_ray.learning.ema import Ema
from flowgrpo_ray.learning.loss_scale import LossScale
from flowgrpo_ray.policies import lora
from flowgrpo_ray.policies.base import Policy
from flowgrpo_ray.policies.slots import changed_tensors
from flowgrpo_ray.sampling.kernels import Transition
from flowgrpo_ray.sampling.sampler import build_conditioning, kernel_of, step_noise, transition_at


class Learner:
    """PPO-clip + KL on the LoRA weights of a policy (Flow-GRPO, arXiv 2505.05470, eq. 4-8).

    Args:
        policy: with LoRA attached; it is sharded here, in place.
        run_id: trajectories of another run are refused.
    """

    plan: StepPlan  # of the step that has begun

    def __init__(self, policy: Policy, config: Config, *, run_id: str, rank: int = 0, world_size: int = 1) -> None:
        self.policy, self.config, self.run_id = policy, config, run_id
        self.rank, self.world_size = rank, world_size
        t = config.train
        if t.activation_checkpointing:
            for module in policy.modules.values():
                transformer: Any = module  # of diffusers
                transformer.enable_gradient_checkpointing()
        self.sharding = parallel.choose_sharding(
            t.sharding, policy, world_size, colocated=config.pools.placement == "colocated")
        parallel.shard(policy, self.sharding, t.shard_size, world_size, config.collective_timeout_s)
        self.kernel = kernel_of(config)
        self.parameters = lora.parameters(policy)
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()), lr=t.learning_rate, betas=t.betas, eps=t.adam_eps,
            weight_decay=t.weight_decay)
        self.ema = Ema(self.parameters, decay=t.ema.decay, every_updates=t.ema.every_updates) if t.ema.enabled else None
        self.loss_scale = LossScale(
            policy.dtype, math.prod(policy.latent_shape(config.sampling.height, config.sampling.width)))
        self.history = History() if config.advantage.baseline == "history" else None
        self.counters = {"updates": 0, "skipped_updates": 0, "idle_updates": 0, "skipped_in_a_row": 0}
        self._exported: Arrays | None = None
        self._exported_ema: Arrays | None = None
        self._exported_digest = ""
        self.finished: tuple[int, dict[str, Arrays], dict] | None = None  # steps done, and `state` after them

    # One training step ------------------------------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan, keep: bool = False) -> None:
        """Start a step: forget the last one's scores, advantages and gradients.

        With `keep`, rank 0 keeps a copy of the state so far as `finished` (a collective where it is sharded).
        """
        self.finished = None
        if keep:
            state = self.state()
            self.finished = (plan.step, *state) if self.rank == 0 else None
        self.plan, self._update = plan, 0
        self._scores: dict[int, GroupScores] = {}
        self._advantages: dict[int, np.ndarray] = {}
        self._recomputed: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor | None]]] = {}
        self._begin_update()

    def _begin_update(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._sums = Diagnostics(self.config.window_size, self.policy.device)

    def add_scores(self, scores: dict[int, GroupScores]) -> None:
        """Scores of complete groups, by group index. Every rank gets those of every group, and computes the same
        advantages from them."""
        self._scores.update(scores)
        if needs_whole_step(self.config):
            if len(self._scores) == len(self.plan.groups) and not self._advantages:
                self._advantages = self._compute(sorted(self._scores))
        else:
            for group in scores:
                self._advantages.update(self._compute([group]))

    def _compute(self, groups: list[int]) -> dict[int, np.ndarray]:
        return step_advantages(
            self.config, {g: self._scores[g] for g in groups}, prompts={g: self.plan.groups[g].prompt for g in groups},
            history=self.history, step=self.plan.step)

    def accumulate(self, work: RankWork, negative: Arrays | None, *parts: Arrays | Trajectory) -> dict[str, float]:
        """Forward and backward over the window of one shard; adds to the gradients of the current update.

        `parts`: the conditioning of every group of the shard, then trajectories that together hold its samples.
        """
        with devices.Stopwatch(self.policy.device) as watch:
            shard, samples = work.shard, list(work.shard.samples)
            batch = self._batch(work, negative, parts)

            def rows(by_group: dict[int, np.ndarray]) -> torch.Tensor:
                return torch.from_numpy(np.concatenate([by_group[group][samples] for group in shard.groups]))

            valid = rows({group: self._scores[group].valid for group in shard.groups}).to(self.policy.device)
            advantages = rows(self._advantages).float().to(self.policy.device)
            self._sums.add_samples(valid, advantages, work.weight)
            for j in range(batch.window[1]):
                loss = self._loss(batch, j, advantages, valid, work)
                (loss * self.loss_scale.value).backward()
        return {"seconds": watch.seconds, "cpu_seconds": watch.cpu_seconds,
                "peak_memory": devices.peak_memory_bytes(self.policy.device)}

    @torch.no_grad()
    def recompute(self, work: RankWork, negative: Arrays | None, *parts: Arrays | Trajectory) -> None:
        """The learner's own old log-probs of a later update's shard (`train.on_ratio_mismatch: recompute`), and its old
        means where RatioNorm needs them; to be called before the step's first `apply`."""
        batch = self._batch(work, negative, parts)
        steps = [batch.forward(self, j)[1] for j in range(batch.window[1])]
        self._recomputed[(work.shard.group, work.shard.shard)] = [
            (step.log_prob(batch.latents[j + 1]), step.mean if self.config.loss.ratio_norm else None)
            for j, step in enumerate(steps)]

    def _loss(
        self, batch: _Batch, j: int, advantages: torch.Tensor, valid: torch.Tensor, work: RankWork
    ) -> torch.Tensor:
        """Sum over the shard's valid samples at window step j, and the step's diagnostics."""
        c = self.config.loss
        velocity, transition = batch.forward(self, j)
        new, old, gate = self._compared(batch, j, transition, work)
        scale = 1.0
        if c.ratio_norm:
            scale = 1.0 / -(batch.sigmas[batch.window[0] + j + 1] - batch.sigmas[batch.window[0] + j]).item()
        policy_loss = losses.clipped_surrogate(new, old, advantages, c.clip_low, c.clip_high) * scale
        total, kl = policy_loss, torch.zeros_like(policy_loss)
        if c.beta > 0:
            with torch.no_grad(), lora.disabled(self.policy):
                velocity_ref, reference = batch.forward(self, j)
            kl = losses.kl(c.kl, transition, reference, velocity, velocity_ref)
            total = policy_loss + c.beta * kl
        self._sums.add_step(j, new.detach() - old, policy_loss.detach(), kl.detach(), valid, work.weight,
                            gate if self._update == 0 else torch.zeros_like(gate), c.clip_low, c.clip_high)
        return (torch.where(valid, total, torch.zeros_like(total)) * work.weight).sum()

    def _compared(
        self, batch: _Batch, j: int, transition: Transition, work: RankWork
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(new, old, gate): new - old [m] is the log ratio that the loss uses, and the gate is the largest |log ratio|,
        in the same measure, of the learner's policy to the sampler's."""
        x_next = batch.latents[j + 1]
        new, old = transition.log_prob(x_next), batch.log_probs[:, j]
        own_mean, difference = None, (new.detach() - old).abs()
        if self.config.train.on_ratio_mismatch == "recompute":
            old, own_mean = ((new.detach(), transition.mean.detach()) if self._update == 0
                             else self._recomputed[(work.shard.group, work.shard.shard)][j])
        if not self.config.loss.ratio_norm:
            return new, old, difference.max()
        noise = batch.noise(j).to(x_next.device)
        new = losses.ratio_norm_log_ratio(noise, transition.mean, x_next - transition.std * noise)
        # The sampler's mean is made again from x', which rounds: log-probs that are equal to the last bit count as
        # equal, and one that is not finite is none.
        measured = difference.isfinite() & (difference > 0)
        gate = torch.where(measured, new.detach().abs(), difference).max()
        if own_mean is not None:
            new = losses.ratio_norm_log_ratio((x_next - own_mean) / transition.std, transition.mean, own_mean)
        return new, torch.zeros_like(old), gate

    def _batch(self, work: RankWork, negative: Arrays | None, parts: tuple[Arrays | Trajectory, ...]) -> _Batch:
        expected = (self.run_id, "policy", self.plan.version)
        groups, window = work.shard.groups, self.plan.groups[work.shard.group].window
        conditionings = cast(tuple[Arrays, ...], parts[: len(groups)])
        trajectories = cast(tuple[Trajectory, ...], parts[len(groups) :])
        for part in trajectories:
            r = part.request
            if (r.run_id, r.slot, r.version) != expected:
                raise FlowGrpoError(f"trajectory of {(r.run_id, r.slot, r.version)} offered to step {expected}")
            places = {key[1:3] for key in r.noise_keys}
            wanted = {(self.plan.step, group) for group in groups}
            if {step for step, _ in places} != {self.plan.step} or not places & wanted or part.window != window:
                raise FlowGrpoError(f"trajectory of (step, group) {sorted(places)} with window {part.window} offered "
                                    f"to {sorted(wanted)} with window {window}")
            if self._exported is not None and part.digest != self._exported_digest:
                raise FlowGrpoError(f"trajectory sampled under adapter {part.digest[:12]}, the learner's version "
                                    f"{self.plan.version} is {self._exported_digest[:12]}")
        return _Batch(self, work, negative, conditionings, trajectories)

    def apply(self) -> dict[str, float]:
        """End an update: reduce over ranks, check the on-policy gate, divide, clip, step. Returns its metrics.

        Raises:
            RatioError: the first update's largest |log ratio| is above the tolerance.
            FlowGrpoError: too many non-finite updates in a row.
        """
        t, params, scale = self.config.train, list(self.parameters.values()), self.loss_scale.value
        with devices.Stopwatch(self.policy.device) as watch:
            metrics = self._sums.reduce(self.world_size)
            if self._update == 0:
                self._check_gate(metrics["first_update_log_ratio_max"])
            parallel.sum_gradients(params, self.world_size)
            count = metrics["valid_samples"] * self.config.window_size
            signal = count > 0 and (metrics["nonzero_advantages"] > 0 or self.config.loss.beta > 0)
            norm = self._step(params, count) if signal else 0.0
            if not signal:
                self.counters["idle_updates"] += 1
            self.optimizer.zero_grad(set_to_none=True)
        metrics["loss"] = metrics["policy_loss"] + self.config.loss.beta * metrics["kl"]
        rms = norm / math.sqrt(sum(p.numel() for p in params))
        metrics |= {"grad_norm": norm, "grad_rms_over_adam_eps": rms / t.adam_eps, "learning_rate": t.learning_rate,
                    "loss_scale": scale, "seconds": watch.seconds, "cpu_seconds": watch.cpu_seconds}
        metrics |= {key: self.counters[key] for key in ("updates", "skipped_updates", "idle_updates")}
        if self.ema is not None:
            metrics["ema_decay"] = self.ema.decay_at(max(self.counters["updates"] - 1, 0))
        self._update += 1
        self._begin_update()
        return metrics

    def _step(self, params: list[torch.nn.Parameter], count: float) -> float:
        """Divide the summed gradients, clip, and step where they are finite. Returns the norm before clipping."""
        for p in params:
            parallel.gradient(p).div_(self.loss_scale.value).div_(count)
        norm = float(parallel.whole(torch.nn.utils.clip_grad_norm_(params, self.config.train.max_grad_norm)))
        self.loss_scale.update(math.isfinite(norm))
        if math.isfinite(norm):
            self.optimizer.step()
            if self.ema is not None:
                self.ema.update(self.counters["updates"])
            self.counters["updates"] += 1
            self.counters["skipped_in_a_row"] = 0
            return norm
        self.counters["skipped_updates"] += 1
        self.counters["skipped_in_a_row"] += 1
        if self.counters["skipped_in_a_row"] > self.config.train.max_skipped_updates:
            raise FlowGrpoError(f"{self.counters['skipped_in_a_row']} updates in a row had non-finite gradients and "
                                "were skipped; train.max_skipped_updates allows no more")
        return norm

    def _check_gate(self, largest: float) -> None:
        if self.config.train.on_ratio_mismatch == "stop" and not largest <= self.ratio_tolerance:
            raise RatioError(
                f"on-policy check: the first update's largest |log ratio| is {largest:.3g}, above the tolerance "
                f"{self.ratio_tolerance:.3g}; sampler and learner do not compute the same policy. Raise "
                "train.ratio_tolerance if the difference is rounding, or set train.on_ratio_mismatch: recompute")

    @property
    def ratio_tolerance(self) -> float:
        exact = self.policy.device.type == "cpu" and self.policy.dtype == torch.float32
        return self.config.ratio_tolerance(exact)

    def step_advantages(self) -> dict[int, np.ndarray]:
        """Advantages of the step by group index (float64 [group_size]), for the record."""
        return dict(self._advantages)

    # What leaves the learner ------------------------------------------------------------------------------------------

    def adapter(self) -> Arrays:
        """The whole adapter, fp32 (a collective where it is sharded)."""
        return {key: _numpy(parallel.whole(p.detach())) for key, p in self.parameters.items()}

    def ema_adapter(self) -> Arrays:
        """The whole EMA adapter; the adapter itself where EMA is off."""
        if self.ema is None:
            return self.adapter()
        return {key: _numpy(parallel.whole(value)) for key, value in self.ema.shadow.items()}

    def export(self, version: int) -> tuple[ExportInfo, Arrays | None, Arrays | None]:
        """The version's adapter and EMA adapter, with what every sync of them is proven against.

        All ranks gather and compute the digests; only rank 0 returns the arrays.
        """
        adapter, ema = self.adapter(), self.ema_adapter()
        before, before_ema = self._exported, self._exported_ema
        self._exported, self._exported_ema, self._exported_digest = adapter, ema, lora.digest(adapter)
        norms = {"adapter_norm": _norm(adapter), "adapter_bytes": sum(a.nbytes for a in adapter.values()),
                 "adapter_delta_norm": _norm({k: adapter[k] - before[k] for k in adapter}) if before else 0.0}
        info = ExportInfo(
            version, self._exported_digest, lora.digest(ema), tensors=len(adapter),
            changed=-1 if before is None else changed_tensors(before, adapter),
            ema_changed=-1 if before_ema is None else changed_tensors(before_ema, ema), norms=norms)
        return info, *((adapter, ema) if self.rank == 0 else (None, None))

    def state(self) -> tuple[dict[str, Arrays], dict]:
        """Everything a resume needs: tensors by file, and JSON-able counters (a collective where sharded)."""
        moments: Arrays = {}
        for key, p in self.parameters.items():
            for name, value in self.optimizer.state.get(p, {}).items():
                moments[f"{key}/{name}"] = _numpy(parallel.whole(value).float())
        tensors = {"adapter": self.adapter(), "ema": self.ema_adapter(), "optimizer": moments}
        return tensors, {**self.counters, "history": self.history.state_dict() if self.history else None,
                         "loss_scale": self.loss_scale.state_dict()}

    def load_state(self, tensors: dict[str, Arrays], counters: dict) -> None:
        """Undo of `state`, bit for bit.

        Raises:
            CheckpointError: the tensors are not this adapter's.
        """
        if set(tensors["adapter"]) != set(self.parameters):
            odd = sorted(set(tensors["adapter"]) ^ set(self.parameters))
            raise CheckpointError(f"the checkpoint's adapter is not this model's: {odd[:3]} are on one side only")
        for key, p in self.parameters.items():
            if (found := tensors["adapter"][key].shape) != p.shape:
                raise CheckpointError(f"the checkpoint's adapter is not this model's: {key} is {tuple(found)}, and the "
                                      f"model needs {tuple(p.shape)}")
        for key, p in self.parameters.items():
            parallel.assign(p, torch.from_numpy(np.array(tensors["adapter"][key])))
            if self.ema is not None:
                parallel.assign(self.ema.shadow[key], torch.from_numpy(np.array(tensors["ema"][key])))
        self._load_moments(tensors["optimizer"])
        self.counters = {key: int(counters[key]) for key in self.counters}
        self.loss_scale.load_state_dict(counters.get("loss_scale"))
        if self.history is not None and counters["history"] is not None:
            self.history.load_state_dict(counters["history"])

    def _load_moments(self, moments: Arrays) -> None:
        self.optimizer.state.clear()
        for key, p in self.parameters.items():
            step = moments.get(f"{key}/step")
            if step is None:
                continue
            state = self.optimizer.state[p]
            state["step"] = torch.tensor(float(step))
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(p, requires_grad=False)
                parallel.assign(state[name], torch.from_numpy(np.array(moments[f"{key}/{name}"])))


class _Batch:
    """One training shard on the device, put together from the trajectories that hold its samples."""

    def __init__(self, learner: Learner, work: RankWork, negative: Arrays | None, conditionings: tuple[Arrays, ...],
                 trajectories: tuple[Trajectory, ...]) -> None:
        device, shard = learner.policy.device, work.shard
        places = {key[2:4]: (part, column) for part in trajectories for column, key in enumerate(part.request.noise_keys)}
        picked = [places[row] for row in shard.rows]
        first = trajectories[0]
        self.window = first.window
        self.latents = from_wire(np.stack([part.latents[:, column] for part, column in picked], axis=1), device)
        self.log_probs = from_wire(np.stack([part.log_probs[column] for part, column in picked]), device)
        self.sigmas = from_wire(first.sigmas)
        keys = tuple(part.request.noise_keys[column] for part, column in picked)
        index = tuple(shard.groups.index(group) for group, _ in shard.rows)
        self.request = replace(first.request, noise_keys=keys, index=index, png=())
        self.conditioning = build_conditioning(learner.policy, self.request, negative, conditionings)

    def forward(self, learner: Learner, j: int):
        """Velocity and transition at window step j."""
        return transition_at(learner.policy, learner.kernel, self.latents[j], self.sigmas, self.window[0] + j,
                             self.conditioning, self.request.guidance_scale)

    def noise(self, j: int) -> torch.Tensor:
        """The noise that the sampler drew at window step j, made again from its seeds."""
        return step_noise(self.request, self.window[0] + j, tuple(self.latents.shape[2:]))


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy().copy()


def _norm(arrays: Arrays) -> float:
    return math.sqrt(sum(float(np.square(a, dtype=np.float64).sum()) for a in arrays.values()))
