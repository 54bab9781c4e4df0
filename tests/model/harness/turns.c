/* The relay, with the loop of its receiver within reach. */
#include "relay/relay.c"

void turn_receiver(struct relay *relay)
{
    run_receiver(relay);
}
