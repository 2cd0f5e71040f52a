"""What both drivers share: how one worker carries out its effects, and its counts."""
