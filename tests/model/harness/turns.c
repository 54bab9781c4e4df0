/* The relay, with the loops of its threads within reach. */
#include "relay.c"

void turn_sender(struct relay *relay)
{
    run_sender(relay);
}

void turn_receiver(struct relay *relay)
{
    run_receiver(relay);
}
