"""A LeaderWorkerSet: the ranks of one replica on several nodes, started by the leader's mpirun over ssh.

A Secret of type kubernetes.io/ssh-auth with ssh-publickey beside ssh-privatekey is the key of every pod of the
deployment: the leader authenticates with it, and also verifies the others by it.
"""

from collections.abc import Mapping

from trtforge.deploy.cluster_settings import ClusterSettings
from trtforge.deploy.config import ClusterConfig
from trtforge.deploy.pods import base_container, environment, escaped, labels, metadata, pod_spec, server_container
from trtforge.deploy.values import Node, When, text
from trtforge.deploy.workload import SCRATCH, Workload

GROUP = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet"}
RANKS = "-ranks"
"""Suffix of the LeaderWorkerSet: its name is that of its headless service, and of its pods with numbers."""
_KEYS, _PORT = "/etc/trtforge/ssh", 2222
_OWN = f"{SCRATCH}/ssh"
_LEADER = "LEADER"
_SSH = (
    f"-p {_PORT} -i {_OWN}/key -o BatchMode=yes -o StrictHostKeyChecking=yes -o UserKnownHostsFile={_OWN}/known_hosts"
)
_SSH_VARIABLES = ("OMPI_MCA_plm_rsh_args", "PRTE_MCA_plm_ssh_args")
"""The variables from which mpirun of Open MPI 4 and 5 reads the options of ssh."""
_COPY_KEY = f"""\
umask 077
mkdir -p {_OWN}
cp {_KEYS}/ssh-privatekey {_OWN}/key
cp {_KEYS}/ssh-publickey {_OWN}/authorized_keys
printf '[*]:{_PORT} %s\\n' "$(cat {_KEYS}/ssh-publickey)" > {_OWN}/known_hosts
"""
_SERVE_RANKS = f"""\
{_COPY_KEY}exec /usr/sbin/sshd -D -e -f /dev/null -p {_PORT} -h {_OWN}/key -o PidFile=none -o UsePAM=no \\
  -o StrictModes=no -o AuthorizedKeysFile={_OWN}/authorized_keys -o PasswordAuthentication=no \\
  -o AllowTcpForwarding=no -o "SetEnv=PATH=$PATH LD_LIBRARY_PATH=${{LD_LIBRARY_PATH:-}} OPAL_PREFIX=${{OPAL_PREFIX:-}}"
"""


def placeholders(nodes: int) -> tuple[str, ...]:
    """Host names for `mpi_command`, which `leader_script` replaces; none for one node."""
    return (_LEADER, *(f"WORKER-{number}" for number in range(1, nodes))) if nodes > 1 else ()


def leader_worker_set(config: ClusterConfig, workload: Workload, settings: ClusterSettings) -> Node:
    """The LeaderWorkerSet. If a pod of a group ends, the whole group restarts, as no rank can continue without the
    others."""
    leader = server_container(config, workload, settings)
    leader["args"] = ["bash", "-c", escaped(leader_script(workload.command[-1], config.nodes))]
    leader["env"] = environment({**workload.environment, **dict.fromkeys(_SSH_VARIABLES, _SSH)})
    worker = {
        **base_container("ranks", config, workload, settings),
        "args": ["bash", "-c", escaped(_SERVE_RANKS)],
        "env": environment(workload.environment),
        "ports": [{"name": "ssh", "containerPort": _PORT}],
        "readinessProbe": {"tcpSocket": {"port": "ssh"}, "periodSeconds": 5},
    }
    return {
        **GROUP,
        "metadata": metadata(settings, text(settings.name, RANKS)),
        "spec": {
            "replicas": When(settings.scaling, settings.replicas, otherwise=True),
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": config.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": _template(config, workload, settings, leader),
                "workerTemplate": _template(config, workload, settings, worker),
            },
        },
    }


def leader_script(script: str, nodes: int) -> str:
    """The script that starts all ranks, with the names of a group's pods in place of the placeholders.

    It waits for the SSH servers of the workers, whose pods start at the same time.
    """
    names = {_LEADER: "${LWS_LEADER_ADDRESS}"}
    names |= {host: _worker(number) for number, host in enumerate(placeholders(nodes)) if number}
    hosts = " ".join(_worker(number) for number in range(1, nodes))
    waiting = f"""\
for host in {hosts}; do
  until ssh ${{{_SSH_VARIABLES[0]}}} "$host" true; do sleep 5; done
done
"""
    for placeholder, name in names.items():
        script = script.replace(f"{placeholder}:", f"{name}:")
    return _COPY_KEY + waiting + script


def headless_service(settings: ClusterSettings) -> Node:
    """The headless service, which names the pods of every group also while they are not ready, as ranks connect
    earlier."""
    name = text(settings.name, RANKS)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(settings, name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"leaderworkerset.sigs.k8s.io/name": name},
        },
    }


def _template(config: ClusterConfig, workload: Workload, settings: ClusterSettings, container: Node) -> Node:
    container["volumeMounts"].append({"name": "ssh", "mountPath": _KEYS, "readOnly": True})
    secret = {"name": "ssh", "secret": {"secretName": settings.ssh, "defaultMode": 0o440}}
    spec: Mapping[str, Node] = pod_spec(config, workload, settings, container, [secret])
    return {"metadata": {"labels": labels(settings)}, "spec": spec}


def _worker(number: int) -> str:
    """The shell expression for a worker's name in the headless service, derived from the leader's:
    NAME-0.NAME.NAMESPACE."""
    return f"${{LWS_LEADER_ADDRESS%%.*}}-{number}.${{LWS_LEADER_ADDRESS#*.}}"
