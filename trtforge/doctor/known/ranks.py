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
        regex=r"Failed, NCCL error .{0,300}'unhandled system error",
        means="NCCL failed in a system call: too little shared memory, no peer access, InfiniBand, or another rank "
        "that ended.",
        do="Look for an earlier error of another rank. If there is none, run again with NCCL_DEBUG=INFO, and give the "
        "container shared memory (--shm-size=1g --ulimit memlock=-1).",
        sources=("TensorRT-LLM issue #1487",),
        kind="effect",
    ),
)
