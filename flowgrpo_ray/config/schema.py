"""The sections of the configuration, every field typed and documented; `config.py` puts them together."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

# Marks of fields. `mark_of` says what a field decides, and so what may change when a run resumes:
#   result          what is trained: fixed, unless run.accept_changes names it
#   evaluation      what is measured: may change
#   infrastructure  where and how the run runs: may change
# A section has a mark, and its fields may carry another one.
RESULT, EVALUATION, INFRASTRUCTURE = "result", "evaluation", "infrastructure"
INPUT = "input"  # names a file, folder or model: at a resume its contents count, not its name
PATH = "path"  # made absolute when the configuration is loaded
PATH_OR_NAME = "path or name"  # the same, if it is a local path and not the name of a model

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the tree: unknown keys are errors, values are checked on assignment too."""

    mark: ClassVar[str] = RESULT
    model_config = ConfigDict(extra="forbid", validate_assignment=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _number_is_no_bool(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML's `true` would pass as the number 1."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError(f"is {str(value).lower()}, which is no number, word or section")
        return value


class RunConfig(Section):
    mark: ClassVar[str] = INFRASTRUCTURE
    name: str = Field(
        "flowgrpo", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the run (letters, digits, . _ -)")
    dir: Annotated[str, PATH] = Field(
        "runs", description="Folder or pyarrow.fs URI (s3://, gs://), the same on every node; a run gets a folder of its name")
    steps: Positive = Field(100, description="Training steps in all, those before a resume included")
    resume: Literal["auto", "never", "must"] = Field(
        "auto", description="auto: resume from the newest checkpoint if there is one; must: fail without one; never: "
        "refuse a folder that already holds a run")
    storage_timeout_s: float = Field(
        60.0, gt=0,
        description="Deadline of one call to an object store; writing a file has a second more per MB")
    hub_timeout_s: float = Field(
        600.0, gt=0,
        description="Deadline of one download from the Hugging Face Hub, except by actors")
    accept_changes: list[str] = Field(
        [], description="Keys that may differ from the checkpoint resumed from, for example [train.learning_rate]")
    accept_changed_inputs: bool = Field(
        False, description="Resume although prompts, model or starting adapter have other contents than before")
    grace_s: float = Field(
        25.0, ge=0, description="Seconds that Ctrl-C or SIGTERM leave for a checkpoint of the last finished step; 0 = none")


class ModelConfig(Section):
    path: Annotated[str, INPUT, PATH_OR_NAME] = Field(
        "builtin:tiny", description="Folder or hub name of a diffusers pipeline; builtin:tiny is shipped")
    family: Literal["auto", "sd3", "flux"] = Field("auto", description="Policy family; auto reads model_index.json")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Dtype of the frozen base model; float16 is trained with a loss scale")
    revision: Annotated[str | None, INPUT] = Field(None, description="Hub revision (branch, tag or commit)")
    variant: str | None = Field(None, description="Weight file variant, for example fp16")
    max_sequence_length: Positive | None = Field(
        None, description="Length of the T5 sequence; default is the family's own (SD3 256, FLUX 512)")
    use_t5: bool = Field(True, description="SD3: load the T5 encoder; without it the pipeline appends zeros")
    offload_encoders: Annotated[bool, INFRASTRUCTURE] = Field(
        False, description="Keep text encoders in CPU memory between encode calls")
    cpu_threads: Positive = Field(1, description="torch threads of every actor process on CPU; bits depend on it")


class LoraSection(Section):
    rank: Positive | None = Field(None, description="LoRA rank r; default is the family's own (SD3 32, FLUX 64)")
    alpha: float | None = Field(None, gt=0, description="LoRA alpha; default 2 r")
    targets: list[str] | None = Field(None, description="Module name endings; default is the family's own")
    init_from: Annotated[str | None, INPUT, PATH] = Field(
        None, description="Folder of an adapter in diffusers format to start from")


class DataConfig(Section):
    train_prompts: Annotated[str, INPUT, PATH] = Field(
        "builtin:tiny/train.txt", description="Prompt file: .txt, .jsonl or .parquet")
    eval_prompts: Annotated[str | None, EVALUATION, INPUT, PATH] = Field(
        None, description="Prompt file for evaluation; none = no evaluation")
    on_long_prompt: Annotated[Literal["warn", "error"], INFRASTRUCTURE] = Field(
        "warn", description="What happens if the text encoders do not read the end of a prompt")
    negative_prompt: str = Field("", description="Negative prompt of records that carry none (used with CFG)")


class WindowConfig(Section):
    size: NonNegative = Field(0, description="Trained SDE steps per group; 0 = all steps but the last")
    range: tuple[int, int] | None = Field(
        None, description="[first, last+1): the window lies inside; default [0, num_steps - 1)")


class SamplingConfig(Section):
    kernel: Literal["flow_sde", "cps", "dance_sde"] = Field("flow_sde", description="Transition kernel of the window")
    noise_level: float = Field(0.7, gt=0, description="a, the noise level of the kernel")
    log_prob: Literal["gaussian", "unscaled"] = Field(
        "gaussian", description="unscaled drops 1/(2 std^2) and the constants, as in the published cps recipes")
    num_steps: Annotated[int, Field(ge=2)] = Field(10, description="Denoising steps when sampling for training")
    guidance_scale: float = Field(1.0, ge=0, description="CFG scale (1 = no CFG pass), or FLUX's guidance input")
    height: Positive = Field(512, description="Image height in pixels, unless the prompt record says otherwise")
    width: Positive = Field(512, description="Image width in pixels, unless the prompt record says otherwise")
    window: WindowConfig = Field(default_factory=WindowConfig, description="Which steps are SDE steps, and trained")
    group_size: int = Field(24, description="Samples per prompt (k)")
    groups_per_step: Positive = Field(48, description="Groups (prompts) per training step")
    micro_batch: Positive = Field(8, description="Samples per shard, the unit of work; it divides group_size")
    batch_groups: Positive = Field(
        1, description="Groups per micro-batch, of one size and with one window; more than 1 needs micro_batch = group_size")
    decode_batch: Positive | None = Field(
        None, description="Images that the VAE decodes at a time; default as many as make 1024 x 1024 pixels, at least 1")
    shared_initial_noise: bool = Field(False, description="All samples of a group start from the same noise")
    max_staleness: NonNegative = Field(0, description="Steps that a sample's weights may lag; only 0 (on-policy) yet")


class EnvironmentConfig(Section):
    mark: ClassVar[str] = INFRASTRUCTURE
    py_executable: str | None = Field(
        None, description="Python of another environment (same Ray version) that the reward's actors run in")
    pip: list[str] | None = Field(
        None, description="Requirements that Ray installs into an environment of the reward's own, on top of the image's")


class RewardConfig(Section):
    type: str | None = Field(None, description="Name of the reward; default is the key, so one kind can be used twice")
    python: str | None = Field(None, description="Your own code instead: module:function or module:Class")
    weight: float = Field(1.0, description="Weight in the sum (or in gdpo); 0 = monitor only, negative = minimise")
    options: dict[str, Any] = Field(default_factory=dict, description="Arguments of the reward itself")
    timeout_s: Annotated[float, INFRASTRUCTURE] = Field(
        120.0, gt=0, description="A longer scoring call has failed; its actor is replaced")
    retries: Annotated[NonNegative, INFRASTRUCTURE] = Field(
        1, description="Times that the images of a failed batch are scored again one by one")
    on_failure: Annotated[Literal["mask", "drop_group", "fail"], INFRASTRUCTURE] = Field(
        "mask", description="What a sample without a score does: it is masked, or its group is, or the run stops")
    max_failure_rate: Annotated[float, INFRASTRUCTURE] = Field(
        0.5, ge=0, le=1, description="The run stops where more than this share of a step's images has no score")
    every_steps: Annotated[Positive, EVALUATION] = Field(
        1, description="Monitors (weight 0): scored in every so many steps only")
    self_test: Annotated[bool, INFRASTRUCTURE] = Field(
        True, description="Score known images when an actor starts (your own reward: one call), and stop if that goes wrong")
    environment: EnvironmentConfig = Field(
        default_factory=EnvironmentConfig, description="An environment of its own; default is that of the run")

    def spec(self, key: str) -> str:
        """What the registry is asked for: a name, or `module:attribute`."""
        return self.python or self.type or key


class AdvantageConfig(Section):
    std: Literal["group", "global", "none"] = Field("group", description="What the centred reward is divided by")
    baseline: Literal["group", "history"] = Field("group", description="Mean of the group, or of the prompt so far")
    combine: Literal["sum", "gdpo"] = Field("sum", description="Sum of weighted scores, or each normalised first")
    eps: float = Field(1e-4, gt=0, description="Added to the standard deviation")
    clip_max: float = Field(5.0, gt=0, description="Advantages are clipped to +- this")
    control: Literal["none", "shuffled"] = Field(
        "none", description="shuffled: a control that must not learn; advantages are permuted within the step")


class LossConfig(Section):
    clip_low: float = Field(1e-4, gt=0, lt=1, description="epsilon_low of the ratio clip")
    clip_high: float = Field(1e-4, gt=0, description="epsilon_high of the ratio clip")
    beta: float = Field(0.0, ge=0, description="Weight of the KL to the reference (the model without adapter)")
    kl: Literal["per_time", "per_step", "velocity"] = Field("per_time", description="How KL is measured; see docs")
    ratio_norm: bool = Field(False, description="GRPO-Guard's RatioNorm (arXiv 2510.22319); needs a gaussian kernel")


class EmaConfig(Section):
    enabled: bool = Field(True, description="Keep an exponential moving average of the LoRA weights")
    decay: float = Field(0.9, ge=0, lt=1, description="Largest decay")
    every_updates: Positive = Field(8, description="Optimizer updates between two EMA updates")


class TrainConfig(Section):
    seed: Seed = Field(42, description="Seed of prompts order, windows, noise and LoRA initialisation")
    updates_per_step: Positive = Field(1, description="Optimizer updates per step; divides groups_per_step")
    micro_batch: Positive | None = Field(None, description="Samples per training forward; default sampling.micro_batch")
    batch_groups: Positive | None = Field(
        None, description="Groups per training forward, within one update; default sampling.batch_groups")
    learning_rate: float = Field(3e-4, gt=0, description="AdamW learning rate, constant")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="AdamW betas")
    adam_eps: float = Field(1e-8, gt=0, description="AdamW eps")
    weight_decay: float = Field(1e-4, ge=0, description="AdamW weight decay")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient norm is clipped to this")
    sharding: Annotated[Literal["none", "full", "hybrid", "auto"], INFRASTRUCTURE] = Field(
        "auto", description="none: base on every rank, LoRA gradients all-reduced; full: FSDP2; hybrid: FSDP2 inside, "
        "replicas across shard_size; auto: none where the base fits")
    shard_size: Annotated[Positive | None, INFRASTRUCTURE] = Field(
        None, description="hybrid: ranks that share one copy of the base")
    activation_checkpointing: Annotated[bool, INFRASTRUCTURE] = Field(
        False, description="Recompute activations in the backward pass")
    ratio_tolerance: Annotated[Annotated[float, Field(ge=0)] | Literal["auto"], INFRASTRUCTURE] = Field(
        "auto", description="Largest |log ratio| of the first update; auto: 0 on CPU fp32, else clip_low / 4")
    on_ratio_mismatch: Literal["stop", "recompute"] = Field(
        "stop", description="stop: refuse the update; recompute: the learner computes the old log-probs itself")
    max_skipped_updates: Annotated[NonNegative, INFRASTRUCTURE] = Field(
        10, description="Non-finite updates in a row that are skipped before the run stops")
    ema: EmaConfig = Field(default_factory=EmaConfig, description="Moving average of the adapter")


class EvalConfig(Section):
    mark: ClassVar[str] = EVALUATION
    every_steps: NonNegative = Field(0, description="Evaluate after every this many steps; 0 = only at start and end")
    at_start: bool = Field(True, description="Evaluate the starting adapter before step 1")
    at_end: bool = Field(True, description="Evaluate after the last step")
    num_prompts: Positive | None = Field(None, description="First prompts of the evaluation file; default all")
    images_per_prompt: Positive = Field(1, description="Images per prompt, at fixed seeds")
    num_steps: Positive = Field(40, description="ODE steps")
    guidance_scale: float | None = Field(None, ge=0, description="Default sampling.guidance_scale")
    micro_batch: Positive | None = Field(None, description="Images per shard; default sampling.micro_batch")
    seed: Seed = Field(1234, description="Seed of the evaluation noise")
    weights: Literal["policy", "ema"] = Field("policy", description="Which weights the headline number is of")
    grid_images: Annotated[int, Field(ge=0, le=64)] = Field(24, description="Images in the sample grids")


class CheckpointConfig(Section):
    mark: ClassVar[str] = INFRASTRUCTURE
    every_steps: NonNegative = Field(10, description="Steps between checkpoints; 0 = only after the last step")
    keep: Positive | None = Field(None, description="Newest checkpoints to keep; default all")


class PoolConfig(Section):
    mark: ClassVar[str] = INFRASTRUCTURE
    replicas: Positive = Field(1, description="Actors in the pool")
    num_cpus: float = Field(1.0, ge=0, description="CPUs that Ray reserves per actor")
    num_gpus: float = Field(0.0, ge=0, description="GPUs per actor, fractions too; 0 = the actor works on CPU")
    label_selector: dict[str, str] = Field(default_factory=dict, description="Ray node labels the actor needs")
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of the actor process")
    nice: Annotated[int, Field(ge=0, le=19)] = Field(0, description="OS niceness; on a shared machine lets others go")


class RolloutPool(PoolConfig):
    timeout_s: float = Field(600.0, gt=0, description="Deadline of one encode or sample call")


class LearnerPool(PoolConfig):
    timeout_s: float = Field(1800.0, gt=0, description="Deadline of one learner call")
    collective_timeout_s: float | None = Field(
        None, gt=0, description="Deadline of one torch.distributed collective; default 120, and two sampling calls "
        "(pools.rollout.timeout_s) more where several colocated ranks wait for each other")


class PoolsConfig(Section):
    mark: ClassVar[str] = INFRASTRUCTURE
    placement: Literal["split", "colocated"] = Field(
        "split", description="split: rollout and learner actors apart; colocated: each learner rank samples too")
    connect_timeout_s: float = Field(
        60.0, gt=0, description="Deadline for connecting to a Ray cluster")
    start_timeout_s: float = Field(600.0, gt=0, description="Deadline for actors to be placed and ready")
    autoscaling: bool = Field(False, description="The cluster can grow: wait start_timeout_s for resources")
    max_actor_deaths: NonNegative = Field(
        16, description="More actors of one pool that die or are taken out in one step stop the run")
    max_failures_in_a_row: Positive = Field(
        3, description="An actor is replaced after so many failed calls in a row that other actors then did")
    rollout: RolloutPool = Field(default_factory=RolloutPool, description="Rollout actors (split placement)")
    learner: LearnerPool = Field(default_factory=LearnerPool, description="Learner ranks (and, colocated, samplers)")
    reward: dict[str, PoolConfig] = Field(default_factory=dict, description="Reward actors, by reward name")


class LoggingConfig(Section):
    mark: ClassVar[str] = INFRASTRUCTURE
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Log level")
    tensorboard: bool = Field(True, description="Write TensorBoard events")
    wandb_project: str | None = Field(None, description="Weights & Biases project; none = off")
    tracker_timeout_s: float = Field(
        60.0, gt=0, description="Wait for trackers at the end; a later one is dropped")
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None, description="Serve the metrics to Prometheus on this port of the driver's node; none = off")
    dashboard: bool = Field(False, description="Start the Ray dashboard where Ray is started on this machine")
    live: bool = Field(True, description="Live view in a terminal (plain lines elsewhere)")
    flush_every_steps: Positive = Field(10, description="Steps per metric part file")
    samples: bool = Field(True, description="Record every sample's scores and advantage in Parquet")


def mark_of(section: type[Section], name: str) -> str:
    """What a field of a section decides: RESULT, EVALUATION or INFRASTRUCTURE; unknown fields count as RESULT."""
    own = marks_of(section, name) & {RESULT, EVALUATION, INFRASTRUCTURE}
    return own.pop() if own else section.mark if name in section.model_fields else RESULT


def marks_of(section: type[Section], name: str) -> set[str]:
    """The marks that a field itself carries."""
    field = section.model_fields.get(name)
    return {mark for mark in field.metadata if isinstance(mark, str)} if field is not None else set()
