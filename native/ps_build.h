/* Written by build_identity.py: the identity of the layout and of the extension's C sources. */
#ifndef PS_BUILD_H
#define PS_BUILD_H

#define PS_BUILD 0xc9ebc18d89a7b982ull

#endif
