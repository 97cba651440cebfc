"""What `phloem doctor` finds out: one function per section, each a list of facts. Reads the machine, changes nothing.

The exception is the CPU's attention kernel, which is compiled if it was not before, as an engine would.
"""

from __future__ import annotations

import math
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

from phloem.kernels.flashinfer_library import why_no_package, why_unavailable
from phloem.kernels.kv_store import PagedKVStore
from phloem.kernels.native_build import BuildError, cache_directory, find_compiler, load_library
from phloem.kernels.self_test import row_invariance_report
from phloem.runtime.config import EngineConfig
from phloem.runtime.memory import CPU_MAX_BYTES, CPU_SHARE, pool_size
from phloem.runtime.models.cache_dir import cache_dir
from phloem.runtime.models.config import ModelConfig
from phloem.runtime.models.loading import preferred_dtype
from phloem.runtime.models.weights import expected_shapes
from phloem.runtime.placement import Placement

PACKAGES = ("phloem", "torch", "transformers", "tokenizers", "llguidance", "sortedcontainers")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OMP_PROC_BIND", "KMP_BLOCKTIME", "GOMP_SPINCOUNT")
_CPU_FEATURES = {
    "AVX2": "_is_avx2_supported",
    "AVX512": "_is_avx512_supported",
    "AVX512-BF16": "_is_avx512_bf16_supported",
    "AMX": "_is_amx_tile_supported",
}
"""By torch's private probes; a torch without one says unknown."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A line of the report."""

    section: str
    name: str
    value: str
    advice: str | None = None
    """What to change, where something is not as it could be."""


def software_facts() -> list[Fact]:
    """Python and the packages that matter."""
    facts = [Fact("Software", "python", f"{platform.python_version()} ({sys.executable})")]
    facts += [Fact("Software", name, _version(name)) for name in PACKAGES]
    return [*facts, Fact("Software", "system", platform.platform())]


def gpu_facts() -> list[Fact]:
    """Everything between torch and an engine on a GPU, and the first thing that is missing."""
    cuda = torch.version.cuda
    facts = [Fact("GPU", "torch's CUDA", cuda or "none: this torch is built without CUDA")]
    if cuda and torch.cuda.is_available():
        facts += [_device_fact(index) for index in range(torch.cuda.device_count())]
    facts.append(Fact("GPU", "flashinfer", why_no_package() or _version("flashinfer-python")))
    facts.append(Fact("GPU", "nvcc", shutil.which("nvcc") or "not on the PATH"))
    reason = why_unavailable()
    usable = Fact("GPU", "can be used", "yes" if reason is None else f"no: {reason}")
    return [*facts, usable]


def cpu_facts(environ: Mapping[str, str]) -> list[Fact]:
    """Processor, memory, compiler and the compiled kernel."""
    memory = psutil.virtual_memory()
    features = {name: getattr(torch.cpu, probe, None) for name, probe in _CPU_FEATURES.items()}
    found = ", ".join(
        f"{name} {'unknown' if probe is None else 'yes' if probe() else 'no'}"
        for name, probe in features.items()
    )
    return [
        Fact("CPU", "processor", f"{processor_name()}, {_usable_cpus()} logical CPUs for this process"),
        Fact("CPU", "features", found),
        Fact("CPU", "computes in", str(preferred_dtype()).removeprefix("torch.")),
        Fact("CPU", "memory", f"{_gib(memory.available)} available of {_gib(memory.total)}"),
        *_kernel_facts(environ),
    ]


def thread_facts(environ: Mapping[str, str]) -> list[Fact]:
    """Threads, and how they wait for each other."""
    facts = [Fact("Threads", "torch", f"{torch.get_num_threads()} threads")]
    facts += [Fact("Threads", name, environ[name]) for name in THREAD_VARIABLES if name in environ]
    load = psutil.getloadavg()[0]
    facts.append(Fact("Threads", "load", f"{load:.1f} on {_usable_cpus()} logical CPUs, last minute"))
    return [*facts, wait_policy_fact(environ.get("OMP_WAIT_POLICY"))]


def wait_policy_fact(policy: str | None) -> Fact:
    """Tell what the threads' wait policy means; None where the variable is not set."""
    name = "OMP_WAIT_POLICY"
    if policy is not None and policy.strip().lower() == "passive":
        note = f"the command sets this where you don't; for a program of your own: export {name}=passive"
        return Fact("Threads", name, f"passive ({note})")
    return Fact(
        "Threads",
        name,
        policy or "not set, so threads spin",
        f"set {name}=passive before torch is imported: beside one other busy process, spinning threads made a step 20 "
        "times slower",
    )


def exactness_facts(environ: Mapping[str, str]) -> list[Fact]:
    """Whether a row has the same bits in any company, per dtype: what "warm equals cold" rests on."""
    facts = []
    for dtype in (torch.bfloat16, torch.float32):
        report = row_invariance_report(dtype, environ=environ)
        name = str(dtype).removeprefix("torch.")
        if report.holds:
            linear = next(check.detail for check in report.checks if check.name.startswith("linear"))
            facts.append(
                Fact("Exactness", name, f"holds in {len(report.checks)} checks; linear layers: {linear}")
            )
            continue
        failed = "; ".join(f"{check.name}: {check.detail}" for check in report.failures)
        advice = "answers from a warm cache may differ from cold ones in rare ties; use the other dtype if it holds there"
        facts.append(Fact("Exactness", name, f"does not hold: {failed}", advice))
    return facts


def file_facts(environ: Mapping[str, str]) -> list[Fact]:
    """Where models and kernels are kept, and the room there."""
    models = cache_dir()
    home = next(folder for folder in (models, *models.parents) if folder.exists())
    kept = sorted(path.name for path in (models / "models").glob("[!.]*") if path.is_dir())
    return [
        Fact("Files", "model cache", f"{models} ({', '.join(kept) or 'empty'})"),
        Fact("Files", "kernel cache", str(cache_directory(environ))),
        Fact("Files", "disk", f"{_gib(shutil.disk_usage(home).free)} free"),
    ]


def engine_facts(name: str, model: ModelConfig, placement: Placement) -> list[Fact]:
    """What an engine of this model would compute with."""
    section = f"Engine: {name}"
    device = placement.device
    where = device.type if placement.why_no_gpu is None else f"{device.type}; no GPU: {placement.why_no_gpu}"
    weights = sum(math.prod(shape) for shape in expected_shapes(model).values()) * placement.dtype.itemsize
    dtype, kv_dtype = (str(each).removeprefix("torch.") for each in (placement.dtype, placement.kv_dtype))
    exact = "yes" if placement.deterministic else "no: ask for it with deterministic=True"
    facts = [
        Fact(section, "runs on", where),
        Fact(section, "attention", placement.backend),
        Fact(section, "computes in", f"{dtype}, KV in {kv_dtype}"),
        Fact(section, "deterministic", exact),
        Fact(section, "a step", f"{placement.max_running} requests, {placement.max_step_tokens:,} tokens at most"),
        Fact(section, "weights", _gib(weights)),
    ]  # fmt: skip
    return facts if device.type != "cpu" else [*facts, _cpu_kv_fact(section, model, placement, weights)]


def _cpu_kv_fact(section: str, model: ModelConfig, placement: Placement, weights: int) -> Fact:
    """What would be left for KV beside the weights.

    Raises:
        InvalidRequest: Not one block.
    """
    config = EngineConfig()
    available = max(0, psutil.virtual_memory().available - weights)
    block_bytes = PagedKVStore.bytes_for_block(
        num_layers=model.num_layers,
        block_size=config.block_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=placement.kv_dtype,
    )
    budget = min(int(available * CPU_SHARE), CPU_MAX_BYTES)
    num_blocks = pool_size(config, block_bytes=block_bytes, available=available, default=budget)
    return Fact(
        section, "KV", f"{num_blocks * config.block_size:,} tokens in {_gib(num_blocks * block_bytes)}"
    )


def _device_fact(index: int) -> Fact:
    major, minor = torch.cuda.get_device_capability(index)
    free, total = torch.cuda.mem_get_info(index)
    name = torch.cuda.get_device_name(index)
    return Fact(
        "GPU", f"cuda:{index}", f"{name}, capability {major}.{minor}, {_gib(free)} free of {_gib(total)}"
    )


def _kernel_facts(environ: Mapping[str, str]) -> list[Fact]:
    try:
        compiler = shlex.join(find_compiler(environ))
        load_library(environ)
    except BuildError as error:
        advice = "attention runs on torch operations, several times slower; install g++ or clang++"
        return [Fact("CPU", "attention kernel", f"not built: {error}", advice)]
    return [Fact("CPU", "compiler", compiler), Fact("CPU", "attention kernel", "compiled, and loads")]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"


def processor_name() -> str:
    """Return what the processor calls itself."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
