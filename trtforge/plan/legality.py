"""Whether a layout fits a model, by arithmetic on config.json: heads, KV heads, layers and AWQ groups per rank.

The rules of GPUs, releases and TensorRT-LLM's kernels are in plan.engine_rules. Sources: TensorRT-LLM issues
#729, #1249, #1636, #2445 and the checks in quantization/layers.py (0.17).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from trtforge.core.errors import ForgeError, Repair
from trtforge.formats.llmapi import is_served
from trtforge.formats.networks import Trait, networks
from trtforge.models.checkpoint_plan import Layout, shards_embedding
from trtforge.models.exclusions import rows_left
from trtforge.models.family import Experts, Facts, Family, Linear, Split
from trtforge.plan.formats import WEIGHTS


@dataclass(frozen=True)
class Problem:
    """A broken rule and its fix. `refuses`: False for a warning."""

    rule: str
    message: str
    fix: str
    refuses: bool = True

    @property
    def text(self) -> str:
        """The problem and its fix, as the text of a warning."""
        return f"{self.message}. {self.fix}"


def sort_problems(problems: Iterable[Problem], refusing: list[Problem], warnings: list[str]) -> None:
    """Add problems that refuse the request to `refusing`, the texts of the others to `warnings`."""
    for problem in problems:
        if problem.refuses:
            refusing.append(problem)
        else:
            warnings.append(problem.text)


def require_warnings_only(problems: Iterable[Problem]) -> list[str]:
    """The texts of the problems that are only warnings. Raises ForgeError for the first problem that refuses."""
    warnings = []
    for problem in problems:
        if problem.refuses:
            raise ForgeError(problem.message, hint=problem.fix)
        warnings.append(problem.text)
    return warnings


def problems(family: Family, facts: Facts, layout: Layout) -> tuple[Problem, ...]:
    """All problems of a layout; empty if it is legal."""
    return tuple(_problems(family, facts, layout))


def require_legal(family: Family, facts: Facts, layout: Layout) -> None:
    """Raises ForgeError with the first problem and its fix."""
    for problem in problems(family, facts, layout):
        legal = legal_tp(family, facts, layout) if problem.rule in _OF_TP else []
        hint = f"Choose --tp from {_listed(legal)}." if legal else problem.fix
        below = [n for n in legal if n <= layout.parallel.tp]
        repair = Repair(options=(("--tp", str(below[-1])),)) if below else None
        raise ForgeError(problem.message, hint=hint).repaired_by(repair)


_OF_TP = frozenset({"heads", "kv_heads", "linear_heads", "columns", "rows"})
"""The rules that another degree of tensor parallelism can satisfy."""


def legal_tp(family: Family, facts: Facts, layout: Layout) -> list[int]:
    """The degrees of tensor parallelism with which the layout has no problems."""
    now = layout.parallel
    layouts = (
        replace(layout, parallel=replace(now, tp=n)) for n in _divisors(facts.sizes.num_heads) if n % now.ep == 0
    )
    return [each.parallel.tp for each in layouts if not problems(family, facts, each)]


def _problems(family: Family, facts: Facts, layout: Layout) -> Iterator[Problem]:
    sizes, parallel = facts.sizes, layout.parallel
    tp = parallel.tp
    if sizes.num_heads % tp:
        fix = f"Choose a --tp that divides {sizes.num_heads}: {_listed(_divisors(sizes.num_heads))}."
        yield Problem("heads", f"{sizes.num_heads} attention heads cannot be split over tp {tp}", fix)
    if sizes.num_kv_heads % tp and tp % sizes.num_kv_heads:
        legal = [n for n in _divisors(sizes.num_heads) if not (sizes.num_kv_heads % n and n % sizes.num_kv_heads)]
        message = f"{sizes.num_kv_heads} KV heads can neither be split over nor replicated on tp {tp}"
        yield Problem("kv_heads", message, f"Choose --tp from {_listed(legal)}.")
    if sizes.num_layers % parallel.pp:
        fix = f"Choose a --pp that divides {sizes.num_layers}: {_listed(_divisors(sizes.num_layers))}."
        yield Problem("layers", f"{sizes.num_layers} layers cannot be split over pp {parallel.pp}", fix)
    yield from _format_problems(family, facts, layout)
    yield from _expert_problems(family, facts, layout)
    if shards_embedding(family, layout) and layout.embedding_sharding_dim == 1 and sizes.hidden % tp:
        message = f"hidden size {sizes.hidden} cannot be split over tp {tp} for the parallel embedding"
        yield Problem("embedding", message, "Use --embedding-sharding-dim 0.")
    yield from _latent_problems(family, layout)
    yield from _linear_attention_problems(facts, layout)
    yield from _linear_problems(family, facts, layout)


def _format_problems(family: Family, facts: Facts, layout: Layout) -> Iterator[Problem]:
    """Problems of formats that no network of the family supports, in any release and on any backend."""
    traits: frozenset[Trait] = frozenset({"experts"} if facts.sparse_layers else ())
    if layout.source and not facts.sparse_layers:
        return
    for limit in networks().limits_of(family.name, layout.quant, traits=traits):
        if limit.every_backend:
            fix = limit.fix
            if layout.source:
                served = is_served(WEIGHTS[layout.quant].algorithm)
                itself = (
                    "Compile the Hugging Face checkpoint itself for backend llmapi, or convert" if served else "Convert"
                )
                fix = f"{itself} the original checkpoint. {limit.fix}"
            yield Problem(limit.rule, limit.says(family.name, layout.quant), fix)


def _latent_problems(family: Family, layout: Layout) -> Iterator[Problem]:
    if any(row.target == "attention.kv_b_proj" for row in family.layer) and layout.kv_cache != "none":
        message = f"{family.name} caches compressed keys and values: a quantised KV cache is not supported"
        yield Problem("kv_cache", message, "Use --kv-cache none.")


def _expert_problems(family: Family, facts: Facts, layout: Layout) -> Iterator[Problem]:
    tp, ep = layout.parallel.tp, layout.parallel.ep
    if not facts.sparse_layers:
        if ep > 1:
            yield Problem("experts", f"{family.name} has no experts to split over ep {ep}", "Use --ep 1.")
        return
    experts, inner = facts.sizes.of("experts"), facts.sizes.of("moe_intermediate")
    if experts % ep:
        legal = [n for n in _divisors(experts) if tp % n == 0]
        yield Problem(
            "experts", f"{experts} experts cannot be split over ep {ep}", f"Choose --ep from {_listed(legal)}."
        )
    if inner % (tp // ep):
        legal = [n for n in _divisors(tp) if experts % n == 0 and inner % (tp // n) == 0]
        message = f"an expert's intermediate size {inner} cannot be split over {tp // ep} ranks (tp {tp}, ep {ep})"
        yield Problem("experts", message, f"Choose --ep from {_listed(legal)}, or another --tp.")
    if inner % (tp // ep) == 0 and not any(_format_problems(family, facts, layout)):
        yield from _expert_group_problems(family, facts, layout)
    if layout.quant == "int4_wo" and layout.compensated:  # else the engine packs the fused outputs of all parts
        for row in family.experts:
            yield from _pair_problems(row, tp // ep if row.split is Split.COLUMN else 1, facts)


def _expert_group_problems(family: Family, facts: Facts, layout: Layout) -> Iterator[Problem]:
    """Problems of groups of weights that share a scale but would be split: an expert is split over tp / ep ranks."""
    format, parallel = WEIGHTS[layout.quant], layout.parallel
    group = format.group_size or layout.group_size
    for row in family.experts if format.grouped else ():
        inputs, shares = facts.sizes.of(row.inputs), parallel.tp // parallel.ep
        per_rank = inputs // shares if row.split is Split.ROW else inputs
        if per_rank % group:
            where = f"{row.parts[0].module.format(0)}: {per_rank} inputs a rank"
            message = f"{where} at tp {parallel.tp} and ep {parallel.ep} are not a multiple of group size {group}"
            yield Problem("awq_group", message, "Choose a larger --ep, a smaller --tp or another format.")


def _pair_problems(row: Linear | Experts, ranks: int, facts: Facts) -> Iterator[Problem]:
    """Problems of weight-only INT4, which packs two outputs in a byte. `ranks`: that the outputs are split over."""
    for part in row.parts:
        per_rank = facts.sizes.of(part.out) // ranks
        if per_rank % 2:
            message = f"{part.module.format(0)}: {per_rank} outputs a rank, weight-only INT4 needs an even number"
            yield Problem("int4_pairs", message, "Choose another format, such as int8_wo.")


def _linear_attention_problems(facts: Facts, layout: Layout) -> Iterator[Problem]:
    groups, tp = facts.sizes.more.get("linear_groups", 0), layout.parallel.tp
    if groups % tp:
        fix = f"Choose a --tp that divides {groups}: {_listed(_divisors(groups))}."
        yield Problem("linear_heads", f"{groups} key heads of linear attention cannot be split over tp {tp}", fix)


def _linear_problems(family: Family, facts: Facts, layout: Layout) -> Iterator[Problem]:
    tp, sizes = layout.parallel.tp, facts.sizes
    try:
        left = rows_left(family, facts, layout.exclude_modules, layout.source)
    except ForgeError as error:
        yield Problem("exclude_modules", error.message, error.hint)
        return
    for row in family.layer:
        if not isinstance(row, Linear) or not _present(row, facts):
            continue
        inputs = sizes.of(row.inputs)
        for part in row.parts:
            out = sizes.of(part.out)
            if row.split is Split.COLUMN and out % tp:
                message = f"{part.module}: {out} outputs cannot be split over tp {tp}"
                yield Problem("columns", message, f"Choose a --tp that divides {out}: {_listed(_divisors(out, 16))}.")
        if row.split is Split.ROW and inputs % tp:
            message = f"{row.parts[0].module}: {inputs} inputs cannot be split over tp {tp}"
            yield Problem("rows", message, f"Choose a --tp that divides {inputs}: {_listed(_divisors(inputs, 16))}.")
        elif WEIGHTS[layout.quant].grouped and row.quantized and row.target not in left:
            yield from _group_problems(row, inputs, layout, facts)
        if layout.quant == "int4_wo" and row.quantized and row.target not in left:
            yield from _pair_problems(row, tp if row.split is Split.COLUMN else 1, facts)


def _present(row: Linear, facts: Facts) -> bool:
    """Whether any layer has the row."""
    return any(facts.holds(row.when, layer) for layer in range(facts.sizes.num_layers))


def _group_problems(row: Linear, inputs: int, layout: Layout, facts: Facts) -> Iterator[Problem]:
    tp, group = layout.parallel.tp, WEIGHTS[layout.quant].group_size or layout.group_size
    per_rank = inputs // tp if row.split is Split.ROW else inputs
    if per_rank % group == 0:
        return
    shared = f"NVFP4 block size {group}" if layout.quant == "nvfp4" else f"AWQ group size {group}"
    message = f"{row.parts[0].module}: {per_rank} inputs a rank at tp {tp} are not a multiple of the {shared}"
    splits = row.split is Split.ROW
    kv_heads = facts.sizes.num_kv_heads
    legal = [
        n
        for n in _divisors(facts.sizes.num_heads)
        if inputs % n == 0 and inputs // n % group == 0 and not (kv_heads % n and n % kv_heads)
    ]
    choices = [f"--tp {n}" for n in legal if splits]
    if group != 64 and per_rank % 64 == 0 and not layout.source:
        choices.append("group size 64 (`trtforge calibrate --group-size 64`)")
    other = (
        "Convert the original checkpoint in another format." if layout.source else "Choose another format, such as fp8."
    )
    fix = f"Choose {' or '.join(choices)}." if choices else other
    yield Problem("awq_group", message, fix)


def _divisors(number: int, most: int = 64) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(str(n) for n in numbers) or "1"
