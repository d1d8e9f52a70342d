"""Import stand-ins that let SGLang run on a machine without a GPU."""
