"""Whether this process can use CUDA through CuPy. Nothing of CuPy is loaded before it is asked."""

from __future__ import annotations

import importlib.util

EXTRAS = "pip install 'gadei-ps[cuda13]', or [cuda12] for a driver of CUDA 12"
NO_DRIVER = 35  # cudaErrorInsufficientDriver


def has_cupy() -> bool:
    return importlib.util.find_spec("cupy") is not None


def missing() -> str:
    """Explain why CUDA cannot be used here, and what to do; empty if it can."""
    if not has_cupy():
        return f"CuPy is not installed ({EXTRAS})"
    try:
        import cupy
        from cupy.cuda import nvrtc, runtime
    except Exception as error:  # a broken installation fails in any way
        return f"CuPy cannot be loaded ({first_line(error)}); {EXTRAS}"
    made_for = cupy.cuda.get_local_runtime_version() // 1000
    try:
        count = runtime.getDeviceCount()
    except Exception as error:  # which class depends on what is broken
        if getattr(error, "status", 0) == NO_DRIVER:
            return f"no NVIDIA driver is there, or it is too old for CuPy's CUDA {made_for}"
        return f"no GPU can be used ({first_line(error)}); run gadei-ps doctor for details"
    if not count:
        return "no GPU is visible; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
    try:
        nvrtc.getVersion()
    except Exception as error:
        wanted = f"cupy-cuda{made_for}x[ctk]"
        return f"CuPy lacks the compiler NVRTC ({first_line(error)}); pip install '{wanted}'"
    return ""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    message = str(error).strip()
    return message.splitlines()[0] if message else type(error).__name__
