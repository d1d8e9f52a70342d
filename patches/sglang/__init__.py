"""The SGLang plugin."""
