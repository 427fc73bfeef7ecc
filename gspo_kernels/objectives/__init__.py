"""The objectives: one small file each. ``__all__`` is the registry that everything iterates."""

from gspo_kernels.objectives.abc_grpo import ABCGRPO as ABCGRPO
from gspo_kernels.objectives.agro import AGRO as AGRO
from gspo_kernels.objectives.bnpo import BNPO as BNPO
from gspo_kernels.objectives.cispo import CISPO as CISPO
from gspo_kernels.objectives.clip_cov import ClipCov as ClipCov
from gspo_kernels.objectives.ctpo import CTPO as CTPO
from gspo_kernels.objectives.dapo import DAPO as DAPO
from gspo_kernels.objectives.dhpo import DHPO as DHPO
from gspo_kernels.objectives.dpo import DPO as DPO
from gspo_kernels.objectives.dppo import DPPO as DPPO
from gspo_kernels.objectives.dr_grpo import DrGRPO as DrGRPO
from gspo_kernels.objectives.dro import DRO as DRO
from gspo_kernels.objectives.egsw import EGSW as EGSW
from gspo_kernels.objectives.espo import ESPO as ESPO
from gspo_kernels.objectives.fipo import FIPO as FIPO
from gspo_kernels.objectives.fspo import FSPO as FSPO
from gspo_kernels.objectives.gmpo import GMPO as GMPO
from gspo_kernels.objectives.gpg import GPG as GPG
from gspo_kernels.objectives.grpo import GRPO as GRPO
from gspo_kernels.objectives.gspo import GSPO as GSPO
from gspo_kernels.objectives.gspo_token import GSPOToken as GSPOToken
from gspo_kernels.objectives.kl_cov import KLCov as KLCov
from gspo_kernels.objectives.linear import Linear as Linear
from gspo_kernels.objectives.luspo import LUSPO as LUSPO
from gspo_kernels.objectives.m2po import M2PO as M2PO
from gspo_kernels.objectives.prime_ipo import PrimeIPO as PrimeIPO
from gspo_kernels.objectives.real import REAL as REAL
from gspo_kernels.objectives.rebel import REBEL as REBEL
from gspo_kernels.objectives.sapo import SAPO as SAPO
from gspo_kernels.objectives.sspo import SSPO as SSPO
from gspo_kernels.objectives.tl_grpo import TLGRPO as TLGRPO
from gspo_kernels.objectives.topr import TOPR as TOPR
from gspo_kernels.objectives.trpa import TRPA as TRPA
from gspo_kernels.objectives.vespo import VESPO as VESPO


def __getattr__(name: str) -> list[str]:
    # an assigned __all__ would hide the imports above from type checkers, which cannot evaluate it
    if name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return sorted(key for key, value in globals().items() if isinstance(value, type))
