"""Cost model of trn2: turns an instruction trace into modelled time. Nothing here was measured."""
