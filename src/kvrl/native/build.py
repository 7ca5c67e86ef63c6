"""Compiling a kernel for this machine, once: the library is kept in the user's cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

# No -ffast-math: it would take NaN for a number, and flush denormals of the whole process to 0.
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fopenmp",
    "-shared", "-fPIC",
)  # fmt: skip
LIBRARIES = ("-lstdc++",)  # which a C compiler in CXX does not add


@functools.cache
def load(name: str) -> ctypes.CDLL | None:
    """The library of `native/NAME.cpp`; None, with a warning, on a machine that cannot compile it."""
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if platform.system() != "Linux" or compiler is None:
        _warn("it needs Linux and g++")
        return None
    source = Path(__file__).with_name(f"{name}.cpp")
    library = cache_dir() / f"{name}-{_key(source, compiler)}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            command = [compiler, *FLAGS, str(source), "-o", str(built), *LIBRARIES]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                _warn(f"{compiler} failed: {(done.stderr.strip().splitlines() or ['no message'])[0]}")
                return None
            try:
                ctypes.CDLL(str(built))
            except OSError as error:
                _warn(f"what {compiler} made cannot be loaded: {error}")
                return None
            built.replace(library)  # by one rename, as another process may be at it too
    return ctypes.CDLL(str(library))


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/kvrl/native`, by default in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrl" / "native"


def _key(source: Path, compiler: str) -> str:
    """Names what the library depends on: source, flags, compiler and processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    cpu = next(
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))
    )
    headers = sorted(source.parent.glob("*.h"))
    parts = (
        source.read_text(),
        *(header.read_text() for header in headers),
        " ".join(FLAGS + LIBRARIES),
        version,
        " ".join(sorted(cpu.split())),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _warn(reason: str) -> None:
    warnings.warn(
        f"rollout.native_kernels: the compiled CPU kernel is not available ({reason}); PyTorch's "
        "operations are used, which are several times slower (set rollout.native_kernels and replay.native_kernels to "
        "false to silence this)",
        stacklevel=3,
    )
