"""What runs inside the SGLang process."""
