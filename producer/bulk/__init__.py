"""Bulk jobs: a file of prompts, streamed through the batch tier by an rq worker that needs neither torch nor a GPU."""
