"""GPUs, and whether their memory can go to another process and to a network card without the host."""

from collections.abc import Sequence

from cluster.doctor.cuda_facts import CudaFacts
from cluster.doctor.finding import Finding, Level


def check_cuda(cuda: CudaFacts, torch: str, rdma_devices: Sequence[str], peer_memory: str) -> list[Finding]:
    """torch: its version ("2.13.0+cpu" is a build without CUDA). peer_memory: see MachineFacts."""
    if not cuda.devices:
        return [_absent(cuda)]
    return [_present(cuda, torch), _ipc(cuda), _gpudirect(cuda, rdma_devices, peer_memory)]


def _absent(cuda: CudaFacts) -> Finding:
    if not cuda.driver:
        return Finding(Level.NOTE, "No GPU", "No NVIDIA driver is loaded: models run on the CPU.")
    what = f"NVIDIA's driver {cuda.driver} is loaded, but CUDA does not start here: {cuda.error}."
    todo = "Containers: start with --gpus all (NVIDIA Container Toolkit). Else check `nvidia-smi`."
    return Finding(Level.SLOW, "The GPU can't be used", what, todo)


def _present(cuda: CudaFacts, torch: str) -> Finding:
    gpus = f"{len(cuda.devices)} x {cuda.devices[0]}, CUDA {cuda.version}, driver {cuda.driver or 'unknown'}"
    if torch.endswith("+cpu"):
        what = f"There is a GPU ({gpus}), but torch {torch} was built without CUDA: models run on the CPU."
        return Finding(Level.SLOW, "The GPU is not used", what, "Install a torch with CUDA, without `+cpu`.")
    return Finding(Level.OK, "GPU", f"{gpus}.")


def _ipc(cuda: CudaFacts) -> Finding:
    if not cuda.ipc_error:
        return Finding(Level.OK, "CUDA IPC", "GPU memory can be opened to another process of this machine.")
    what = f"GPU memory could not be opened to another process ({cuda.ipc_error}): KV would go by way of the host."
    todo = (
        "Containers: start with --ipc=host. Virtual GPUs and WSL lack CUDA IPC. A full GPU fails here too: run again."
    )
    return Finding(Level.SLOW, "CUDA IPC", what, todo)


def _gpudirect(cuda: CudaFacts, rdma_devices: Sequence[str], peer_memory: str) -> Finding:
    title = "GPUDirect RDMA"
    if not rdma_devices:
        return Finding(Level.NOTE, title, "It needs an RDMA device, which this machine lacks.")
    if peer_memory or cuda.dmabuf:
        way = f"the module {peer_memory}" if peer_memory else "dmabuf"
        return Finding(Level.OK, title, f"The network card reaches GPU memory by {way}.")
    what = "Neither nvidia_peermem is loaded nor does the driver offer dmabuf: KV would go by way of the host."
    todo = "Run `modprobe nvidia_peermem`, or use NVIDIA's open kernel driver with Linux 5.12 or newer."
    return Finding(Level.SLOW, title, what, todo)
