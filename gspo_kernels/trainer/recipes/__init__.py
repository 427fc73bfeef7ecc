"""Recipes: what a step of the run learns from, and how.

The plain one completes each prompt several times. iGRPO does so with the best of earlier drafts in view.
TL-GRPO asks again after an environment's feedback, and every turn is a group of its own. VerIPO puts steps of
DPO between the steps of any of them. DAPO's dynamic sampling and its penalty on length are in the plain one.
"""
