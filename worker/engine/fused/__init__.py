"""Whole decoder steps in one native call, for model structures that are recognised exactly; bfloat16 on the CPU."""
