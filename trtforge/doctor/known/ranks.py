"""Ranks: their number, how they connect, and which of them failed first."""

from trtforge.doctor.pattern import Pattern

_START_RANKS = (
    "Start one process for each rank: `trtforge serve` reads the layout from the engine and does so, or "
    "`mpirun -n <tp*pp>` by hand."
)

PATTERNS = (
    Pattern(
        id="mpi-size",
        title="number of ranks is not tp*pp",
        regex=r"mpiSize == tp \* pp",
        means="The number of MPI processes is not the engine's tensor times pipeline parallelism.",
        do=_START_RANKS,
        sources=("TensorRT-LLM issue #1992",),
    ),
    Pattern(
        id="mpi-size-counted",
        title="number of ranks is not tp*pp",
        regex=r"MPI size (?P<ranks>\d+) != TP size (?P<tp>\d+) \* PP size (?P<pp>\d+)",
        means="{ranks} MPI processes were started; the engine was built for tensor parallelism {tp} times pipeline "
        "parallelism {pp}.",
        do=_START_RANKS,
        sources=("TensorRT-LLM issue #1992",),
    ),
    Pattern(
        id="mpi-world-size-executor",
        title="number of ranks is not tp*pp",
        regex=r"MPI worldSize is expected to be equal to tp\*pp(?:\*cp)?",
        means="The number of MPI processes is not the engine's tensor times pipeline (times context) parallelism.",
        do=_START_RANKS,
        sources=("TensorRT-LLM executor source", "TensorRT-LLM issue #2021"),
    ),
    Pattern(
        id="engine-world-size",
        title="number of ranks is not tp*pp",
        regex=r"Engine world size \((?P<tp>\d+) \* (?P<pp>\d+)\) != Runtime world size \((?P<ranks>\d+)\)",
        means="The engine was built for {tp} * {pp} ranks; {ranks} were found at run time.",
        do="Start {tp} * {pp} ranks with mpirun. If you did, the MPI library that TensorRT-LLM uses is another than "
        "mpirun's, and every process counts itself as the only one: compare mpi4py with `mpirun --version`.",
        sources=("TensorRT-LLM issue #753",),
    ),
    Pattern(
        id="mpi-abort",
        title="a rank aborted all ranks",
        regex=r"MPI_ABORT was invoked on rank (?P<rank>\d{1,9})(?!\d)",
        means="Rank {rank} aborted all ranks, because of an earlier error of its own.",
        do="Look for the first error of rank {rank}; if ranks cannot be told apart, run mpirun with --tag-output.",
        sources=("TensorRT-LLM issue #2813",),
        kind="effect",
    ),
    Pattern(
        id="slurm-pmi",
        title="MPI was not started by Slurm",
        regex=r"PMI2_Init failed to initialize",
        means="Inside a Slurm allocation MPI sees Slurm's variables and looks for Slurm's launcher, which did not "
        "start it.",
        do="Put `mpirun -n 1` in front of the command, or unset the variables that begin with SLURM_, PMI_ and PMIX_.",
        sources=("TensorRT-LLM documentation, troubleshooting",),
    ),
    Pattern(
        id="peer-access",
        title="GPUs cannot read each other's memory",
        regex=r"peer access is not supported",
        means="The custom all-reduce needs GPUs that read each other's memory; these two cannot (PCIe topology, or a "
        "consumer GPU).",
        do="Use NCCL's all-reduce (build without custom all-reduce), or pipeline instead of tensor parallelism. "
        "`nvidia-smi topo -p2p r` shows the pairs.",
        sources=("TensorRT-LLM issue #1499",),
    ),
    Pattern(
        id="peer-access-between",
        title="GPUs cannot read each other's memory",
        regex=r"Can't enable access between nodes (?P<first>\d+) and (?P<second>\d+)",
        means="GPUs {first} and {second} cannot read each other's memory; the custom all-reduce needs that.",
        do="Use NCCL's all-reduce (build without custom all-reduce), or pipeline instead of tensor parallelism. "
        "`nvidia-smi topo -p2p r` shows the pairs.",
        sources=("TensorRT-LLM issue #1499", "TensorRT-LLM issue #1374"),
    ),
    Pattern(
        id="nccl-system-error",
        title="NCCL could not communicate",
        regex=r"Failed, NCCL error .{0,300}'(?:unhandled system error|internal error)",
        means="NCCL failed in a system call or in itself: too little shared memory, no peer access, InfiniBand, or "
        "another rank that ended.",
        do="Look for an earlier error of another rank. If there is none, run again with NCCL_DEBUG=INFO, and give the "
        "container shared memory (--shm-size=1g --ulimit memlock=-1).",
        sources=("TensorRT-LLM issue #1487", "TensorRT-LLM issue #213", "tensorrtllm_backend issue #54"),
        kind="effect",
    ),
    Pattern(
        id="gpu-shared-by-ranks",
        title="two ranks on one GPU",
        regex=r"Duplicate GPU detected ?: rank (?P<first>\d+) and rank (?P<second>\d+) both on CUDA device "
        r"(?P<device>\w+)",
        means="Ranks {first} and {second} were given the same GPU (PCI bus {device}); NCCL needs one for each rank.",
        do="Show every process all GPUs of its ranks (CUDA_VISIBLE_DEVICES, docker --gpus, the pod's limit), and start "
        "as many ranks on a node as it has GPUs.",
        sources=("TensorRT-LLM issue #9263", "tensorrtllm_backend issue #170"),
    ),
    Pattern(
        id="nccl-invalid-usage",
        title="NCCL refused the ranks",
        regex=r"Failed, NCCL error .{0,300}'invalid usage",
        means="NCCL refused how it was called, mostly because two ranks have the same GPU.",
        do="Run again with NCCL_DEBUG=WARN and look for `Duplicate GPU detected`; show every process all GPUs.",
        sources=("TensorRT-LLM issue #9263", "tensorrtllm_backend issue #170"),
        kind="effect",
    ),
    Pattern(
        id="nccl-cuda-error",
        title="NCCL failed in CUDA",
        regex=r"NCCL error .{0,300}unhandled cuda error",
        means="A CUDA call of NCCL failed: often GPU memory is full, or an earlier kernel failed.",
        do="Look for an earlier error; if there is none, run again with NCCL_DEBUG=INFO, and leave NCCL memory (a "
        "smaller KV cache).",
        sources=("TensorRT-LLM source, py_executor_creator.py",),
        kind="effect",
    ),
    Pattern(
        id="mpi-slots",
        title="MPI has too few slots",
        regex=r"There are not enough slots available in the system to satisfy the (?P<slots>\d+)"
        r"|All nodes which are allocated for this job are already filled",
        means="Open MPI may not start that many processes here: without a host file it counts processor cores, and "
        "under Slurm or mpirun the tasks of the allocation. TensorRT-LLM's LLM API starts its ranks by MPI, too.",
        do="Give the machine, container or allocation at least one core or task for each rank, or allow more: "
        "OMPI_MCA_rmaps_base_oversubscribe=1, in Open MPI 5 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe.",
        sources=("TensorRT-LLM issue #5854", "TensorRT-LLM issue #5495", "Open MPI documentation, MCA"),
    ),
    Pattern(
        id="mpi-root",
        title="mpirun does not run as root",
        regex=r"mpirun has detected an attempt to run as root",
        means="Open MPI's mpirun refuses to start as root, which containers often are.",
        do="Add --allow-run-as-root, or set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1.",
        sources=("Open MPI documentation, mpirun",),
    ),
    Pattern(
        id="mpi-init",
        title="MPI could not start",
        regex=r"It looks like MPI_INIT failed for some reason",
        means="MPI could not connect the processes. Lines above and below (`UCX ERROR`, `pml_ucx`) name the network "
        "device or the library.",
        do="If a network device is named, leave it out (UCX_NET_DEVICES, UCX_TLS) or give it to the container.",
        sources=("TensorRT-LLM issue #3112",),
        kind="effect",
    ),
    Pattern(
        id="mpi-shared-memory",
        title="/dev/shm is too small",
        regex=r"there is not enough space for (?P<file>/dev/shm/\S{1,200})",
        means="/dev/shm has no room for the segment {file} by which MPI's processes communicate; a container has 64 "
        "MiB by default.",
        do="Start the container with --shm-size=2g (Kubernetes: an emptyDir of medium Memory at /dev/shm).",
        sources=("TensorRT-LLM issue #1021",),
    ),
    Pattern(
        id="mpi-library",
        title="MPI is not installed",
        regex=r"(?P<library>libmpi\w{0,40}\.so[\w.]{0,20}): cannot open shared object file",
        means="mpi4py found no {library}: no MPI is installed, or another one than it was compiled for.",
        do="Install Open MPI (Debian, Ubuntu: libopenmpi-dev), or use TensorRT-LLM's image; there, keep "
        "/usr/local/mpi/lib in LD_LIBRARY_PATH.",
        sources=("TensorRT-LLM issue #167", "TensorRT-LLM documentation, installation"),
    ),
    Pattern(
        id="gpus-required",
        title="fewer GPUs than ranks",
        regex=r"Only (?P<found>\d+) GPUs are available, but (?P<needed>\d+) are required",
        means="The LLM API needs {needed} GPUs and sees {found} on this node. Several nodes need its launcher.",
        do="Use a smaller tp or pp; over several nodes start every rank with mpirun or srun and trtllm-llmapi-launch "
        "(`trtforge serve --launcher slurm` does).",
        sources=("TensorRT-LLM issue #2594", "TensorRT-LLM source, llmapi/llm.py"),
    ),
)
