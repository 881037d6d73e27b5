"""Stage: writes the files that run a repository with Docker Compose, Kubernetes or Helm."""
