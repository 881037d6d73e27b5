"""The Helm chart: the objects of the plain manifests as templates, and the settings that they read."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from trtforge import __version__
from trtforge.core.api_keys import KEY_VARIABLE
from trtforge.core.manifest import FILE_NAME
from trtforge.deploy.cluster import Cluster
from trtforge.deploy.config import LONGEST_NAME, name_pattern
from trtforge.deploy.leader_worker import RANKS
from trtforge.deploy.values import Value, as_template, as_yaml, settings

_TYPES: Mapping[type, str] = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
_OLDEST, _IMAGE_VOLUMES = ">=1.29.0-0", ">=1.33.0-0"
_LONGEST_RELEASE = 53  # characters of a release's name, in Helm
_CHECKED = "templates/serviceaccount.yaml"
"""The template that checks the release's name; every deployment has it."""
_NOTES = """\
{{ .Release.Name }} serves in namespace {{ .Release.Namespace }} once its engine is loaded:

  kubectl --namespace {{ .Release.Namespace }} WAIT
  kubectl --namespace {{ .Release.Namespace }} port-forward service/{{ .Release.Name }} HTTP:HTTP
  curl http://127.0.0.1:HTTP/v2/models/MODEL/generateKEY -d '{"text_input": "Hello", "max_tokens": 32}'
"""


def chart(cluster: Cluster) -> dict[str, str]:
    """The files of the chart."""
    templates = {
        f"templates/{name}": "---\n".join(map(as_template, objects)) for name, objects in cluster.objects.items()
    }
    templates[_CHECKED] = _name_check(cluster.config.nodes) + templates[_CHECKED]
    used = chart_values(cluster)
    about = {
        "apiVersion": "v2",
        "name": cluster.config.name,
        "description": "A Triton model repository that trtforge packaged.",
        "type": "application",
        "version": __version__,
        "appVersion": cluster.workload.facts.tensorrt_llm,
        "kubeVersion": _IMAGE_VOLUMES if cluster.config.repository_image is not None else _OLDEST,
    }
    return {
        "Chart.yaml": as_yaml(about),
        "values.yaml": _values_yaml(used),
        "values.schema.json": json.dumps(values_schema(used), indent=2) + "\n",
        ".helmignore": "\n".join([FILE_NAME, *cluster.dockerfiles, ""]),
        **templates,
        "templates/NOTES.txt": _notes(cluster),
        **cluster.dockerfiles,
    }


def chart_values(cluster: Cluster) -> tuple[Value, ...]:
    """The settings that the templates read, each once, without Helm's own."""
    found = {each.path: each for objects in cluster.objects.values() for each in settings(objects) if not each.builtin}
    return tuple(found[path] for path in sorted(found))


def values_schema(values: Iterable[Value]) -> dict[str, Any]:
    """The JSON schema of values.yaml: what Helm checks before it renders."""
    root = _object()
    for value in values:
        *above, last = value.path.split(".")
        place = root
        for name in above:
            if name not in place["properties"]:  # null would remove all values of the group, which templates read
                place["properties"][name] = _object()
                place.setdefault("required", []).append(name)
            place = place["properties"][name]
        place["properties"][last] = {"description": value.about, "type": _TYPES[type(value.value)], **value.schema}
        if value.schema:  # null would remove a value, such as the clients that a policy admits
            place.setdefault("required", []).append(last)
    # A parent chart may pass `global`.
    root["properties"]["global"] = {"type": "object"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **root}


def _object() -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": {}}


def _values_yaml(values: Iterable[Value]) -> str:
    """values.yaml, with a comment for each setting."""
    lines: list[str] = []
    group = ""
    for value in values:
        above, _, last = value.path.rpartition(".")
        if above and above != group:
            lines.append(f"{above}:")
        group, indent = above, "  " if above else ""
        lines.append(f"{indent}# {value.about}")
        lines += [f"{indent}{line}" for line in as_yaml({last: value.value}).splitlines()]
    return "\n".join([*lines, ""])


def _name_check(nodes: int) -> str:
    """A template that fails for a release's name that the objects cannot have.

    Helm allows dots and a digit first, which a Service's name may not have, and more characters than the names of a
    LeaderWorkerSet's pods have room for: `controller-revision-hash`, a label with at most 63, is made of them.
    """
    longest = LONGEST_NAME if nodes > 1 else _LONGEST_RELEASE
    why = f"the name of this release must have at most {longest} lower-case letters, digits and hyphens, a letter first"
    pattern = f"^{name_pattern(longest)}$"
    return f"""\
{{{{- if not (regexMatch {json.dumps(pattern)} .Release.Name) }}}}
{{{{- fail {json.dumps(why)} }}}}
{{{{- end }}}}
"""


def _notes(cluster: Cluster) -> str:
    wait = "rollout status deployment/{{ .Release.Name }}"
    if cluster.config.nodes > 1:  # rollout supports only Kubernetes' own kinds
        wait = f"wait --for=condition=Available --timeout=1h leaderworkerset/{{{{ .Release.Name }}}}{RANKS}"
    port, model = str(cluster.workload.ports["http"]), cluster.workload.facts.model("ensemble")
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if cluster.config.api_key_secret is not None else ""
    return _NOTES.replace("WAIT", wait).replace("HTTP", port).replace("KEY", key).replace("MODEL", model)
