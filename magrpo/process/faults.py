"""Describing faults of the machine (disks, permissions, processes, memory) in one line with a path and a remedy."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

_OTHER_DISK = "free some space, or choose another disk with root=FOLDER or --root"
_OTHER_FOLDER = "choose a folder that you may write to, with root=FOLDER or --root"
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Error numbers of disks."""
_SMALLER = (
    "magrpo train --dry-run shows what uses the memory; lower rollout.max_new_tokens, or engine.max_batch (of "
    "engine.kind = 'transformers' or 'vllm'), set optim.gradient_checkpointing = true, or end other processes on the "
    "GPU"
)
_REMEDIES = {
    errno.ENOSPC: _OTHER_DISK,
    errno.EDQUOT: _OTHER_DISK,
    errno.EROFS: _OTHER_FOLDER,
    errno.EACCES: _OTHER_FOLDER,
    errno.EPERM: _OTHER_FOLDER,
    errno.ENOTDIR: "there is a file where a folder is needed",
    errno.EEXIST: "there is a file where a folder is needed",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "raise ulimit -n",
    errno.ENOMEM: "raise ulimit -v, or the container's memory limit",
    errno.EAGAIN: "raise ulimit -u, or the container's process limit",
}


def describe_fault(error: OSError | MemoryError | RuntimeError) -> str:
    """Describe a fault of the machine, or an error of this project, in one line; empty for any other RuntimeError."""
    if isinstance(error, MemoryError):
        return f"out of memory; {_REMEDIES[errno.ENOMEM]}"
    if isinstance(error, RuntimeError):
        if "can't start new thread" in str(error):
            return f"{error}; raise ulimit -u and -v, or the container's process and memory limits"
        if type(error).__module__.startswith(("magrpo", "pipelines")):
            return str(error)
        return _describe_allocation(error) if "torch" in sys.modules else ""
    if error.errno is None or error.strerror is None:
        return str(error)
    where = "" if error.filename is None else f"{error.filename}: "
    remedy = _REMEDIES.get(error.errno)
    return f"{where}{error.strerror}; {remedy}" if remedy else f"{where}{error.strerror}"


def _describe_allocation(error: RuntimeError) -> str:
    """Describe an error of PyTorch about memory that ran out, in one line; empty for any other error."""
    if "DefaultCPUAllocator" in str(error):
        return f"out of memory; {_REMEDIES[errno.ENOMEM]}"
    said = str(error).partition("\n")[0].partition(". GPU")[0]
    return f"{said.rstrip('.')}; {_SMALLER}" if is_out_of_memory(error) else ""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether GPU memory ran out: in torch's allocator, or in cuBLAS, cuDNN or a launch, which raise other errors."""
    import torch  # which has raised the error

    signs = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA_ERROR_OUT_OF_MEMORY")
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(sign in str(error) for sign in signs)


@contextmanager
def name_full_disk(folder: Path) -> Iterator[None]:
    """Raise OSError, with the name of ``folder``, if the block fails because nothing can be written there.

    PyTorch and safetensors raise errors of their own for a full disk, PyTorch without the reason. A test file then
    shows whether the disk was the reason. An OSError from writing to an open file has no file name.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_ERRORS and error.filename is None:
            error.filename = str(folder)
        raise
    except (RuntimeError, SafetensorError) as error:
        if "No space left on device" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        try:
            _write_probe(folder / ".probe")
        except OSError as full:
            raise full from error
        raise


def _write_probe(path: Path) -> None:
    path.write_bytes(bytes(2**20))
    path.unlink()
