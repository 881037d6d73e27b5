"""`trtforge plan` as a user types it."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL
from trtforge.cli.app import main
from trtforge.machine.memory import Memory

LLAMA_70B = "meta-llama/Llama-3.1-70B"
KEYS = {"legal", "problems", "memory", "kv_tokens", "max_concurrency", "longest_prompt", "estimates", "alternatives"}
MEMORY_KEYS = {"weights", "kv_per_token", "kv_pool", "activations", "total", "per_gpu"}


@dataclass(frozen=True)
class Done:
    """What a run of the program left."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]
Planned = Callable[..., dict[str, Any]]


@pytest.fixture
def trtforge(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`trtforge WORDS`, in this process."""

    def run(*words: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["trtforge", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return Done(int(end.value.code or 0), printed.out, printed.err)

    return run


@pytest.fixture
def planned(trtforge: Run) -> Planned:
    """The JSON of a plan."""

    def plan(*words: str | Path, status: int = 0) -> dict[str, Any]:
        done = trtforge("plan", *words, "--json")
        assert done.returncode == status, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert found.keys() >= KEYS
        assert found["memory"].keys() >= MEMORY_KEYS
        return found

    return plan


def test_a_known_model_needs_no_network(planned: Planned) -> None:
    found = planned(LLAMA_70B, "--gpu", "h100-80gb", "--tp", "4", "--concurrency", "32")
    assert found["legal"] is True
    assert found["memory"]["weights"] == pytest.approx(141.1e9, rel=0.005)
    assert found["memory"]["kv_per_token"] == 327_680
    assert found["max_concurrency"] == found["kv_tokens"] // 131_072
    assert found["longest_prompt"] == 131_071
    assert found["estimates"]["concurrency"] == 32
    assert found["alternatives"] == []


def test_what_is_not_legal_is_refused_with_what_is(trtforge: Run, planned: Planned) -> None:
    words = (LLAMA_70B, "--gpu", "a100-80gb", "--tp", "4", "--quant", "fp8")
    found = planned(*words, status=1)
    (problem,) = found["problems"]
    assert problem["rule"] == "gpu_format"
    assert problem["fix"] == f"Use {' '.join(problem['apply'])}."
    assert planned(*words, *problem["apply"])["legal"] is True
    done = trtforge("plan", *words)
    command = f"trtforge plan {' '.join((*words[:-2], *problem['apply']))}"
    assert done.stderr.splitlines() == [
        f"error: {problem['message']}",
        f"hint: {problem['fix']} Run `{command}`.",
    ]
    assert "not legal" in done.stdout


def test_an_illegal_layout_still_says_how_large_the_model_is(planned: Planned) -> None:
    found = planned(LLAMA_70B, "--tp", "3", status=1)
    assert found["memory"]["weights"] == pytest.approx(141.1e9, rel=0.005)
    assert found["memory"]["per_gpu"] is None
    assert found["kv_tokens"] is None
    assert found["estimates"] == {}


def test_alternatives_have_their_figures_and_reasons(trtforge: Run, planned: Planned) -> None:
    found = planned(LLAMA_70B, "--gpu", "h200", "--alternatives", "--goal", "quality")["alternatives"]
    assert (found[0]["quant"], found[0]["kv_cache"]) == ("none", "none")
    for alternative in found:
        assert alternative["memory"]["per_gpu"] > 0
        assert alternative["estimates"]["tpot_ms"] > 0
        assert alternative["why"]
    done = trtforge("plan", LLAMA_70B, "--alternatives", "--goal", "latency")
    assert "Alternatives, best first for latency" in done.stdout
    assert "Estimates, not measurements" not in done.stdout  # no GPU, no times
    assert "fits: " in done.stdout
    assert "each ms" not in done.stdout  # which only the table of one GPU has


@pytest.mark.parametrize("source", ["demo-int4awq", str(DEMO_MODEL)])
def test_recipes_and_directories_are_planned(planned: Planned, source: str) -> None:
    found = planned(source, "--tp", "2")
    assert found["choice"]["tp"] == 2
    assert found["legal"] is True
    assert found["choice"]["quant"] == ("int4_awq" if source == "demo-int4awq" else "none")


def test_a_recipes_keys_can_be_changed_and_a_models_not(trtforge: Run, planned: Planned) -> None:
    assert planned("demo-fp32", "--set", "engine.max_seq_len=512")["longest_prompt"] == 511
    assert trtforge("plan", DEMO_MODEL, "--set", "engine.max_seq_len=512").returncode == 2


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ((LLAMA_70B, "--quant", "fp6"), 2, "--quant: fp6 is not a format"),
        ((LLAMA_70B, "--goal", "speed"), 2, "speed is not a goal"),
        ((LLAMA_70B, "--group-size", "32"), 2, "--group-size 32"),
        ((LLAMA_70B, "--gpu", "h300"), 1, "GPU h300 is not known"),
        (("demo-int4",), 1, "demo-int4: no such file or directory, and no recipe of this name ships with trtforge"),
        (("./nowhere/at-all",), 1, "no such directory"),
    ],
)
def test_wrong_words_are_named(trtforge: Run, words: tuple[str, ...], status: int, message: str) -> None:
    done = trtforge("plan", *words)
    assert done.returncode == status
    assert message in done.stderr
    assert done.stdout == ""


def test_a_gpu_has_short_names(planned: Planned) -> None:
    assert planned(LLAMA_70B, "--gpu", "h100", "--tp", "4")["choice"]["gpu"] == "h100-80gb"


def test_without_a_layout_the_fewest_gpus_are_planned(trtforge: Run, planned: Planned) -> None:
    found = planned(LLAMA_70B, "--gpu", "h100")
    assert (found["legal"], found["choice"]["tp"], found["choice"]["pp"]) == (True, 2, 1)
    assert found["notes"][0].startswith("planned for tp 2, pp 1, the fewest GPUs: with tp 1, pp 1 weights, activations")
    assert "note: planned for tp 2, pp 1, the fewest GPUs" in trtforge("plan", LLAMA_70B, "--gpu", "h100").stdout
    # What was asked for is planned as it is, and so is what fits.
    assert planned(LLAMA_70B, "--gpu", "h100", "--tp", "1", status=1)["choice"]["tp"] == 1
    assert planned("Qwen/Qwen2.5-7B", "--gpu", "h100")["notes"] == []


def test_illegal_is_no_failure_where_alternatives_are_asked_for(trtforge: Run, planned: Planned) -> None:
    words = (LLAMA_70B, "--gpu", "a100", "--tp", "4", "--quant", "fp8")
    found = planned(*words, "--alternatives")
    assert found["legal"] is False
    assert found["alternatives"]
    done = trtforge("plan", *words, "--alternatives")
    assert (done.returncode, done.stderr) == (0, "")
    assert trtforge("plan", *words).returncode == 1


def test_what_is_printed_explains_itself(trtforge: Run) -> None:
    printed = trtforge("plan", "Qwen/Qwen2.5-7B", "--gpu", "h100", "--alternatives", "--goal", "latency").stdout
    columns = [line for line in printed.splitlines() if line.startswith("  ")]
    assert columns
    assert max(map(len, columns)) <= 80
    assert "Estimates, not measurements, for requests of 1,024 prompt tokens and 256 output tokens" in printed
    assert "  requests at once  first token  each further token  tokens/s of all requests\n" in printed
    (header,) = [number for number, line in enumerate(columns) if line.split()[:2] == ["#", "GPUs"]]
    answers = [float(line.split()[6]) for line in columns[header + 1 :]]
    assert len(answers) > 3
    assert answers == sorted(answers)
    assert "answer s: seconds from a request to its last token" in printed


@pytest.mark.parametrize(("gigabytes", "verdict"), [(8, "enough"), (1, "too little")])
def test_a_plan_for_the_cpu_speaks_of_host_memory(
    trtforge: Run, monkeypatch: pytest.MonkeyPatch, gigabytes: int, verdict: str
) -> None:
    most = gigabytes * 10**9
    monkeypatch.setattr("trtforge.machine.memory.read_memory", lambda host: Memory(most, most, None))
    printed = trtforge("plan", "demo-int4awq").stdout
    assert " on the CPU (tp 1, pp 1); int4_awq weights" in printed
    assert re.search(r"\nHost memory\n  part +fullest rank +all ranks\n", printed)
    assert f"\nthis machine has {gigabytes} GB of memory: {verdict}\n" in printed
    assert "GPU" not in printed
    assert " on 2 ranks on the CPU (tp 2, pp 1)" in trtforge("plan", "demo-tp2").stdout


def test_a_problem_is_one_line(trtforge: Run) -> None:
    printed = trtforge("plan", "Qwen/Qwen2.5-7B", "--tp", "8").stdout
    assert "\nproblem: 28 attention heads cannot be split over tp 8. Use --tp 4.\n" in printed


def test_planning_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['trtforge', 'plan', {LLAMA_70B!r}, '--gpu', 'b200', '--alternatives']\n"
        "from trtforge.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tritonclient', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
