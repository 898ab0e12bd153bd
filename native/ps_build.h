/* Written by build_identity.py: the identity of the layout and of the extension's C sources. */
#ifndef PS_BUILD_H
#define PS_BUILD_H

#define PS_BUILD 0x0159b13b9279f65eull

#endif
