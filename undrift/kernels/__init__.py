"""Faster forms of plain functions, each named after its plain form; `register` imports them all.

A kernel imports its plain function and registers itself with it (`core/forms.py`). It is compiled when it is first used.
"""
