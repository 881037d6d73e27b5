"""Which ranks get an expert, and which part of it: expert and tensor parallelism of a mixture of experts.

Source: tensorrt_llm/mapping.py (`moe_tp_rank`, `moe_ep_rank`) and models/convert_utils.py, 0.17.
"""

from trtforge.models.split import Cut


def expert_cuts(expert: int, experts: int, shared: tuple[Cut, ...], ep: int) -> tuple[Cut, ...]:
    """The cuts of one expert for all ranks; ranks of other expert-parallel groups get nothing.

    `shared` are the cuts for the ranks of one group. Rank t is in group t % ep, where it is rank t // ep.
    """
    group = expert // (experts // ep)
    nothing = Cut((), range(0))
    return tuple(shared[rank // ep] if rank % ep == group else nothing for rank in range(len(shared) * ep))
