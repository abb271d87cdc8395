 ByJ€xÈ­ÈÆÇ:­È-ÉÉ:ÆÇßÈFÇFÇ­ÈxÈßÈFÇÈ:ßÈ”ÈÈ-ÉÆÈ:ÉøÈ:ÉÉÆÇÉxÈøÈ”È9G8HŠHŠH¸HgH
H
H-I
H¸H
H
H¡HþH9G9G!I¹GŠHŠH
H¡H-I¸H
H8H9G9Gé;é;gH