"""Using data: loader, draft model, losses, trainer, export, evaluation."""
