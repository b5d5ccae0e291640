"""`flowgrpo-ray doctor`: why is the curve flat? Each check is a number of the run directory, a verdict and a sentence.

It reads files only: no Ray, no model. The thresholds are rules of thumb, written beside the checks that use them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flowgrpo_ray.errors import counted
from flowgrpo_ray.run_dir import watch
from flowgrpo_ray.run_dir.metrics import Row
from flowgrpo_ray.run_dir.run_data import RunData
from flowgrpo_ray.views import grids
from flowgrpo_ray.views.charts import keys_of
from flowgrpo_ray.views.page import number, sentence

Verdict = Literal["ok", "look", "bad", "none"]
RECENT = 10  # training steps, the newest, that a check takes its mean over


@dataclass(frozen=True)
class Finding:
    """One check. `verdict` "none": the run directory does not hold what it needs."""

    check: str
    number: str
    verdict: Verdict
    advice: str
    symptom: bool = False  # what the other checks explain


def examine(run_dir: str) -> list[Finding]:
    """All checks, in the order in which they explain each other. Raises FlowGrpoError if rows are damaged."""
    run = RunData.read(run_dir)
    rows = run.training[-RECENT:]
    if not rows:
        return [Finding("Training steps", "0", "bad", _no_steps(run))]
    return [*_curve(run), _masks(run, rows), *_trouble(run), *_spread(run, rows), _zero_spread(rows), _moved(run, rows),
            _clip(run, rows), _gradient(run, rows), _adapter(rows), _images(run)]


def diagnosis(findings: Sequence[Finding]) -> str:
    """The finding to act on first, in one line."""
    for verdict in ("bad", "look"):
        found = [finding for finding in findings if finding.verdict == verdict]
        if causes := [finding for finding in found if not finding.symptom] or found:
            return f"{'Start with' if verdict == 'bad' else 'Nothing is broken; look first at'}: {causes[0].check}"
    return "Nothing stands out."


# The checks -----------------------------------------------------------------------------------------------------------

def _no_steps(run: RunData) -> str:
    if run.rows and "stopped" in run.rows[-1]:
        return "The run stopped in its first step: its last row counts the failures, and the log of the run names the reason."
    return "No training step is on file yet; rows are written every logging.flush_every_steps steps and at checkpoints."


def _curve(run: RunData) -> list[Finding]:
    """Does anything rise? Per optimised reward, by evaluation if there are two, else in training."""
    out = []
    collapsed = {change.name: change for change in watch.collapses(run.rows, run.config, run.weights)}
    for name, weight in watch.weights_of(run.config).items():
        if not weight:
            continue
        change = (watch.evaluation_change(run.rows, name, weight, run.weights)
                  or watch.training_change(run.rows, name, weight))
        if change is None:
            out.append(Finding(f"Reward {name}", "too few steps", "none", "It takes two evaluations, or six training steps."))
            continue
        text = f"{number(change.first)} → {number(change.last)} ({change.source})"
        if name in collapsed:
            out.append(Finding(f"Reward {name}", text, "bad", sentence(watch.collapse_text(collapsed[name], run.config))))
        elif change.gain > watch.STANDARD_ERRORS * change.error:
            out.append(Finding(f"Reward {name}", text, "ok", "It improves by more than two standard errors."))
        elif change.fell:
            out.append(Finding(f"Reward {name}", text, "bad", "It gets worse: lower train.learning_rate, or set loss.beta > 0.",
                               symptom=True))
        else:
            out.append(Finding(f"Reward {name}", text, "look", "Flat within noise: the checks below say what could be the "
                               "reason.", symptom=True))
    if run.at("advantage", "control") == "shuffled":
        out.append(Finding("Control", "advantages shuffled", "bad", "This run is a control and must not learn; set "
                           "advantage.control: none for a run that should."))
    return out


def _masks(run: RunData, rows: Sequence[Row]) -> Finding:
    """Up to 1 % of samples without a score is ordinary, beyond 20 % the groups shrink."""
    masked, valid = (sum(row.get(key, 0.0) for row in rows) for key in ("masked_samples", "valid_samples"))
    share = masked / (masked + valid) if masked + valid else 0.0
    failures = {key.partition("/")[2]: run.rows[-1].get(key, 0.0) for key in keys_of(run.rows, "scoring_failures")}
    worst = max(failures, key=lambda name: failures[name], default="")
    dropped = sum(row.get("dropped_groups", 0.0) for row in rows)
    text = f"{share:.1%} of samples, {counted(int(dropped), 'group')} dropped"
    if share <= 0.01 and not dropped:
        return Finding("Samples without a score", text, "ok", "Every sample, or nearly every one, takes part.")
    named = f" Most failures are of the reward {worst}." if failures.get(worst) else ""
    return Finding("Samples without a score", text, "bad" if share > 0.2 else "look",
                   f"The log of the run says why scoring fails; a longer rewards.<name>.timeout_s or more actors help a slow "
                   f"reward.{named}")


def _trouble(run: RunData) -> list[Finding]:
    last, out = run.rows[-1], []
    lost = {name: sum(last.get(key, 0.0) for key in keys_of(run.rows, name)) for name in ("timeouts", "actor_deaths")}
    text = f"{lost['timeouts']:.0f} timeouts, {lost['actor_deaths']:.0f} actor deaths"
    out.append(Finding("Errors", text, "look" if any(lost.values()) else "ok",
                       "They cost time, not correctness; the log of the run names each." if any(lost.values())
                       else "No call timed out and no actor died."))
    skipped, idle, made = (last.get(key, 0.0) for key in ("skipped_updates", "idle_updates", "updates"))
    text = f"{made:.0f} made, {skipped:.0f} not finite, {idle:.0f} without any advantage"
    total = max(made + skipped + idle, 1.0)
    if skipped:
        out.append(Finding("Updates", text, "bad" if skipped / total > 0.1 else "look",
                           "Gradients overflow: use model.dtype: bfloat16, or a lower train.learning_rate."))
    else:
        out.append(Finding("Updates", text, "bad" if idle / total > 0.5 else "look" if idle else "ok",
                           "Idle updates had no sample with an advantage: see the groups without spread." if idle
                           else "Every update stepped.", symptom=True))
    gate, tolerance = (max(row.get("first_update_log_ratio_max", 0.0) for row in run.training), _clip_of(run) / 4)
    out.append(Finding("On-policy check", f"|log ratio| up to {gate:.2g}", "ok" if gate <= tolerance else "look",
                       "Sampler and learner compute the same policy." if gate <= tolerance else
                       "Above a quarter of the clip, sampling and learning differ by more than rounding should; "
                       "train.on_ratio_mismatch: recompute removes it."))
    if "stopped" in last:
        out.append(Finding("End", f"stopped in step {last['step']:.0f}", "bad", "The log of the run names the reason."))
    return out


def _zero_spread(rows: Sequence[Row]) -> Finding:
    """Half of the groups without signal halves the batch; at nine in ten little is left."""
    share = watch.mean(row.get("zero_std_group_fraction", 0.0) for row in rows)
    verdict: Verdict = "bad" if share > 0.9 else "look" if share > 0.5 else "ok"
    return Finding("Groups without spread", f"{share:.0%}", verdict, "Most groups carry a signal." if verdict == "ok" else
                   "All samples of such a group score the same, so it teaches nothing: raise sampling.group_size or "
                   "sampling.noise_level, take prompts that are neither too easy nor too hard, or a finer reward.")


def _spread(run: RunData, rows: Sequence[Row]) -> list[Finding]:
    weights = {name: weight for name, weight in watch.weights_of(run.config).items() if weight}
    spreads = {name: watch.mean(known) for name in weights
               if (known := [row[key] for row in rows if (key := f"reward_group_std/{name}") in row])}
    out = []
    for name, weight in weights.items():
        check = f"Spread of {name}"
        if name not in spreads:
            out.append(Finding(check, "no score", "bad", "No sample of the recent steps has a score."))
            continue
        level = abs(watch.mean(row.get(f"reward_mean/{name}", 0.0) for row in rows))
        largest = max(abs(weights[other]) * spread for other, spread in spreads.items())
        share = abs(weight) * spreads[name] / largest if largest else 1.0
        verdict, advice = _judged_spread(run, spreads[name], level, share, several=len(weights) > 1)
        out.append(Finding(check, f"{spreads[name]:.3g} inside a group, around {number(level)}", verdict, advice))
    return out


def _judged_spread(run: RunData, spread: float, level: float, share: float, several: bool) -> tuple[Verdict, str]:
    """Advantages are (r - mean) / (std + advantage.eps): a spread near eps shrinks them, one far below is rounding. `share`:
    weighted spread over the largest one, which is the say that a reward has under `sum`."""
    eps, combine = float(run.at("advantage", "eps") or 1e-4), watch.combine_of(run.config)
    if spread < eps / 10 or (spread < eps and not several):
        return "bad", ("The reward is all but constant, so nothing can be learnt from it: check what it returns with "
                       "`flowgrpo-ray score`, and widen its scale.")
    if several and combine == "sum":
        if share < 0.05:
            return "look", (f"Its weighted spread is {share:.1%} of the largest one, so it has hardly any say: raise its "
                            "weight, or use advantage.combine: gdpo.")
    elif spread < 10 * eps:
        return "look", (f"Near advantage.eps ({eps:g}), which shrinks the advantages: lower advantage.eps or scale the reward "
                        "up.")
    elif several and spread < 0.05 * level:
        return "look", ("gdpo gives this narrow reward the same say as the others: keep its weight low unless these small "
                        "differences matter.")
    return "ok", "Samples of a group differ, which is what is learnt from."


def _clip_of(run: RunData) -> float:
    found = [float(value) for key in ("clip_low", "clip_high") if (value := run.at("loss", key))]
    return min(found, default=1e-4)


def _later(run: RunData, rows: Sequence[Row], key: str) -> float:
    """Mean of a metric over the updates after the first of each step, whose ratio is 1 by construction."""
    updates = int(run.at("train", "updates_per_step") or 1)
    return watch.mean(row.get(key, 0.0) for row in rows) * updates / (updates - 1)


def _moved(run: RunData, rows: Sequence[Row]) -> Finding:
    """The root mean square of log p(new) - log p(old), against the clip range."""
    check, clip = "|Δ log p| against the clip", _clip_of(run)
    if int(run.at("train", "updates_per_step") or 1) < 2:
        return Finding(check, "one update per step", "none",
                       "With one update per step the ratio is 1 when it is measured, so the clip plays no part.")
    moved = math.sqrt(2 * _later(run, rows, "approx_kl")) / clip
    text = f"{moved:.2g} × the clip range of {clip:g}"
    if moved < 1e-3:
        return Finding(check, text, "bad", "Updates hardly change the policy: raise train.learning_rate.")
    if moved < 0.02:
        return Finding(check, text, "look", "Small updates: a higher train.learning_rate may learn faster.")
    if moved > 3:
        return Finding(check, text, "bad", "Updates leave the clip range at once: raise loss.clip_low and loss.clip_high, or "
                       "lower train.learning_rate.")
    return Finding(check, text, "ok", "Updates use the clip range without filling it.")


def _clip(run: RunData, rows: Sequence[Row]) -> Finding:
    if int(run.at("train", "updates_per_step") or 1) < 2:
        return Finding("Clipped ratios", "one update per step", "none", "There is nothing to clip.")
    share = min(1.0, _later(run, rows, "clip_fraction"))
    text = f"{share:.0%} after the first update of a step"
    if share > 0.4:
        return Finding("Clipped ratios", text, "bad" if share > 0.75 else "look",
                       "Clipped samples give no gradient: raise loss.clip_low and loss.clip_high, or lower "
                       "train.learning_rate.")
    return Finding("Clipped ratios", text, "ok", "Most samples still give a gradient.")


def _gradient(run: RunData, rows: Sequence[Row]) -> Finding:
    """AdamW divides by sqrt(second moment) + eps: a gradient near eps makes the step smaller than the learning rate says."""
    check, eps = "Gradient RMS against AdamW's eps", float(run.at("train", "adam_eps") or 1e-8)
    known = [row["grad_rms_over_adam_eps"] for row in rows if math.isfinite(row.get("grad_rms_over_adam_eps", math.nan))]
    if not known:  # fp32 adapter: four bytes a parameter
        known = [row["grad_norm"] / math.sqrt(row["adapter_bytes"] / 4) / eps for row in rows
                 if math.isfinite(row.get("grad_norm", math.nan)) and row.get("adapter_bytes")]
    if not known:
        return Finding(check, "not on file", "none", "The metrics hold no gradient norm.")
    ratio = watch.mean(known)
    text = f"{ratio:.3g} × eps ({eps:g})"
    if ratio == 0:
        return Finding(check, text, "bad", "There is no gradient at all: no sample had an advantage and loss.beta is 0.")
    if ratio < 10:
        return Finding(check, text, "bad" if ratio < 1 else "look",
                       f"eps damps the steps: lower train.adam_eps, for example to {eps * min(ratio, 1) / 100:.0e}.")
    return Finding(check, text, "ok", "The gradient, not eps, sets the step.")


def _adapter(rows: Sequence[Row]) -> Finding:
    """A step moves the adapter by about learning_rate per weight: 1e-6 of its norm is standing still, a third is a leap."""
    known = [(row["adapter_delta_norm"], row["adapter_norm"]) for row in rows
             if row.get("adapter_norm") and "adapter_delta_norm" in row]
    if not known:
        return Finding("Adapter", "not on file", "none", "The metrics hold no adapter norm.")
    share, norm = watch.mean(delta / norm for delta, norm in known), known[-1][1]
    text = f"norm {number(norm)}, moved by {share:.2g} of it per step"
    if share < 1e-5:
        return Finding("Adapter", text, "bad" if share < 1e-6 else "look",
                       "The adapter stands still: raise train.learning_rate, after the checks of masks, spread and gradient.")
    if share > 0.3:
        return Finding("Adapter", text, "look", "Very large steps: lower train.learning_rate.")
    return Finding("Adapter", text, "ok", "The adapter is being changed.")


def _images(run: RunData) -> Finding:
    """8-bit steps: below 0.1 nobody sees a difference, below 1 hardly."""
    check = "Images against the base"
    ends = grids.ends(run.run_dir, run.weights)
    found = grids.same_noise(ends[0][1], ends[1][1]) if len(ends) == 2 else []
    if not found or ends[0][0] != 0:
        return Finding(check, "not on file", "none", "It takes the grids of the evaluation at the start and of a later one "
                       "(eval.at_start, eval.every_steps, eval.grid_images).")
    mean = watch.mean(grids.difference(a, b) for a, b in found)
    text = (f"mean difference {mean:.2g} of 255 after {counted(ends[1][0], 'step')}, "
            f"{counted(len(found), 'image')} at the same noise")
    if mean < 1:
        return Finding(check, text, "bad" if mean < 0.1 else "look",
                       "The images are still those of the base: the adapter has had too little effect so far.", symptom=True)
    return Finding(check, text, "ok", "The adapter changes the images; the report shows them side by side.")
