"""Dockerfiles of images that are not published: with trtforge, with an SSH server, with the repository."""

from trtforge import __version__
from trtforge.deploy.workload import CACHE, USER, Workload

DOCKERFILE, REPOSITORY_DOCKERFILE = "Dockerfile", "repository.Dockerfile"
WHEEL = f"trtforge-{__version__}-py3-none-any.whl"
WHEEL_CONTEXT = "wheel"
"""The named build context for the directory with the wheel."""


def embedded_dockerfile() -> str:
    """The image of the embedded engine: trtforge, the Triton of nvidia-pytriton, a compiler for the CPU kernels."""
    return f"""\
# The server of the embedded engine. DIRECTORY holds {WHEEL}:
#   docker build --build-context {WHEEL_CONTEXT}=DIRECTORY -t IMAGE .
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# For a machine without GPUs, a build of torch for CPUs saves gigabytes.
ARG TORCH="torch>=2.8"
RUN pip install --no-cache-dir "$TORCH"
RUN --mount=type=bind,from={WHEEL_CONTEXT},target=/wheel \\
    pip install --no-cache-dir "/wheel/{WHEEL}[serve,openai,guided]"
RUN useradd --uid {USER} --create-home triton-server && install -d -o {USER} -g {USER} {CACHE}
USER {USER}:{USER}
"""


def ranks_dockerfile(workload: Workload) -> str:
    """NVIDIA's image with the SSH server by which mpirun starts ranks on other nodes."""
    return f"""\
# The server of an engine whose ranks are on several nodes: docker build -t {workload.image} .
FROM {workload.base}
USER root
RUN apt-get update && apt-get install --yes --no-install-recommends openssh-server && rm -rf /var/lib/apt/lists/*
USER {USER}:{USER}
"""


def repository_dockerfile(image: str) -> str:
    """The model repository as an image, for an image volume of Kubernetes."""
    return f"""\
# The model repository, for an image volume: docker build -f {REPOSITORY_DOCKERFILE} -t {image} REPOSITORY
FROM scratch
COPY . /
"""


def dockerfiles(workload: Workload, *, nodes: int = 1, repository_image: str | None = None) -> dict[str, str]:
    """The Dockerfiles that a deployment needs, by file name."""
    files = {}
    if workload.embedded:
        files[DOCKERFILE] = embedded_dockerfile()
    elif nodes > 1:
        files[DOCKERFILE] = ranks_dockerfile(workload)
    if repository_image is not None:
        files[REPOSITORY_DOCKERFILE] = repository_dockerfile(repository_image)
    return files
