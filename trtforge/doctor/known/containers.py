"""Docker: why a container did not start."""

from trtforge.doctor.pattern import Pattern

PATTERNS = (
    Pattern(
        id="docker-no-gpu",
        title="docker without GPUs",
        regex=r"could not select device driver \S+ with capabilities: \[\[gpu\]\]",
        means="docker cannot give GPUs to a container: the NVIDIA Container Toolkit is not installed, or docker was "
        "not restarted after its installation.",
        do="Install nvidia-container-toolkit, run `nvidia-ctk runtime configure --runtime=docker` and restart docker.",
        sources=("nvidia-docker issue #1034", "nvidia-docker issue #1642"),
    ),
    Pattern(
        id="container-no-gpu",
        title="container without GPUs",
        regex=r"The NVIDIA Driver was not detected",
        means="The container was started without GPUs.",
        do="Start it with --gpus all (Kubernetes: a limit of nvidia.com/gpu); if it was, install "
        "nvidia-container-toolkit, run `nvidia-ctk runtime configure --runtime=docker` and restart docker.",
        sources=("NVIDIA's images, their entry point",),
        kind="warning",
    ),
    Pattern(
        id="docker-no-image",
        title="image does not exist",
        regex=r"(?:pull access denied for|manifest for) (?P<image>[^\s,]+)",
        means="The registry has no image {image}, or requires a login.",
        do="Check the name (`trtforge compile --dry-run` prints the release's image), and log in to its registry with "
        "`docker login`.",
        sources=("moby, distribution/errors.go",),
    ),
    Pattern(
        id="docker-no-daemon",
        title="docker daemon not reachable",
        regex=r"Cannot connect to the Docker daemon|permission denied while trying to connect to the [Dd]ocker",
        means="docker cannot reach its daemon: none is running, or this user is not in the group docker.",
        do="Start docker, and add the user to the group docker (or use rootless docker).",
        sources=("Docker documentation, Troubleshooting the Docker daemon",),
    ),
)
