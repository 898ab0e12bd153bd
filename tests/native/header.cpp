// gadei.h in C++: included alone and first, and its functions linked by their C names.
#include "gadei.h"

#include <cstdint>
#include <cstdio>

int main(int count, char **arguments)
{
    gadei_learner *learner = nullptr;
    if (gadei_attach(count > 1 ? arguments[1] : nullptr, "cpp", &learner) != GADEI_OK) {
        std::puts(gadei_error(nullptr));
        return 1;
    }
    std::uint32_t tensors = 0;
    const gadei_tensor *first = gadei_tensors(learner, &tensors);
    std::printf("%u %s\n", tensors, first->name);
    gadei_detach(learner);
    return 0;
}
