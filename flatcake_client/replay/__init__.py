"""`flatcake replay`: a trace in real time, with real bytes, against FlatCake and its peers. The seam is `system`."""
