"""The papers' scheduling policies, each a pure module over the views of `port`; `profiles` composes them under names."""
