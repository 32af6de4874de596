"""What to call a plan: its kind, for groups and tables, and itself in a few letters."""

from jaxsoftmax import Plan

# A row in registers (and shared memory) of a block, of a cluster; in the ring of a block, of a
# cluster; read twice; cut over blocks in two launches, in one.
KINDS = ("one_pass", "cluster", "ring", "ring_cluster", "two_pass", "split_k", "cooperative")


def kind(plan: Plan) -> str:
    """One of KINDS."""
    if plan.path == "split_k":
        return "cooperative" if plan.smem_packs else "split_k"
    if plan.path == "two_pass":
        return "two_pass"
    if plan.reg_packs == 0 and plan.smem_packs > 0:
        return "ring_cluster" if plan.splits > 1 else "ring"
    return "cluster" if plan.splits > 1 else "one_pass"


def describe(plan: Plan) -> str:
    """A plan in a few letters: kind, threads, then what it holds and cuts."""
    each = f"/{plan.rows_per_block}" if plan.rows_per_block > 1 else ""
    held = f" r{plan.reg_packs}" if plan.reg_packs else ""
    held += f" m{plan.smem_packs}" if plan.smem_packs else ""
    cut = f" s{plan.splits}" if plan.splits > 1 else ""
    return f"{kind(plan)} {plan.threads}{each}{held}{cut}"
