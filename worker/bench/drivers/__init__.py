"""One program per engine. Each loads its engine once, then runs the request sets that it reads from standard input."""
