"""Structured outputs: grammars that say which tokens may come next. The only package that imports xgrammar."""
