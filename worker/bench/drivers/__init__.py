"""One program an engine. Each loads its engine once, then runs the request sets it reads from standard input."""
