"""The objectives, one file each. ``__all__`` is the registry of the command line, trainer and adapters."""

from gspo_kernels.objectives.abc_grpo import ABCGRPO
from gspo_kernels.objectives.agro import AGRO
from gspo_kernels.objectives.bnpo import BNPO
from gspo_kernels.objectives.cispo import CISPO
from gspo_kernels.objectives.clip_cov import ClipCov
from gspo_kernels.objectives.cppo import CPPO
from gspo_kernels.objectives.ctpo import CTPO
from gspo_kernels.objectives.dapo import DAPO
from gspo_kernels.objectives.dhpo import DHPO
from gspo_kernels.objectives.dpo import DPO
from gspo_kernels.objectives.dppo import DPPO
from gspo_kernels.objectives.dr_grpo import DrGRPO
from gspo_kernels.objectives.dro import DRO
from gspo_kernels.objectives.drpo import DRPO
from gspo_kernels.objectives.egsw import EGSW
from gspo_kernels.objectives.espo import ESPO
from gspo_kernels.objectives.fipo import FIPO
from gspo_kernels.objectives.fspo import FSPO
from gspo_kernels.objectives.gmpo import GMPO
from gspo_kernels.objectives.gpg import GPG
from gspo_kernels.objectives.grpo import GRPO
from gspo_kernels.objectives.gspo import GSPO
from gspo_kernels.objectives.gspo_token import GSPOToken
from gspo_kernels.objectives.kl_cov import KLCov
from gspo_kernels.objectives.linear import Linear
from gspo_kernels.objectives.luspo import LUSPO
from gspo_kernels.objectives.m2po import M2PO
from gspo_kernels.objectives.minpro import MinPRO
from gspo_kernels.objectives.prime_ipo import PrimeIPO
from gspo_kernels.objectives.promises import check as check
from gspo_kernels.objectives.real import REAL
from gspo_kernels.objectives.rebel import REBEL
from gspo_kernels.objectives.sapo import SAPO
from gspo_kernels.objectives.spo import SPO
from gspo_kernels.objectives.sspo import SSPO
from gspo_kernels.objectives.tl_grpo import TLGRPO
from gspo_kernels.objectives.topr import TOPR
from gspo_kernels.objectives.trpa import TRPA
from gspo_kernels.objectives.vespo import VESPO

__all__ = [
    "ABCGRPO",
    "AGRO",
    "BNPO",
    "CISPO",
    "CPPO",
    "CTPO",
    "DAPO",
    "DHPO",
    "DPO",
    "DPPO",
    "DRO",
    "DRPO",
    "EGSW",
    "ESPO",
    "FIPO",
    "FSPO",
    "GMPO",
    "GPG",
    "GRPO",
    "GSPO",
    "LUSPO",
    "M2PO",
    "REAL",
    "REBEL",
    "SAPO",
    "SPO",
    "SSPO",
    "TLGRPO",
    "TOPR",
    "TRPA",
    "VESPO",
    "ClipCov",
    "DrGRPO",
    "GSPOToken",
    "KLCov",
    "Linear",
    "MinPRO",
    "PrimeIPO",
]
