"""Faster forms of single operations, each named after the plain one it equals; `register` imports them all.

A kernel imports the plain function and registers itself as a form of it (`core/forms.py`), never the other way round. Nothing is
compiled before it is first used.
"""
