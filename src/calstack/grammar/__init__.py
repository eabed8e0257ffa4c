"""Structured output: constraints of a request → token masks (llguidance). Token ids in, masks out; no HTTP, no engine."""

from calstack.grammar.checked import CheckedGrammars
from calstack.grammar.matcher import Grammars, Matcher, load_grammars
from calstack.grammar.source import GrammarSpec, grammar_source

__all__ = ["CheckedGrammars", "GrammarSpec", "Grammars", "Matcher", "grammar_source", "load_grammars"]
